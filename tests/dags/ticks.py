"""Prints when Airflow would run each cron in each zone; run in a process of its own."""

import json
import sys
from datetime import UTC, datetime, timedelta

import pendulum
from airflow.timetables.trigger import CronTriggerTimetable


def main(question: str) -> None:
    """Print one list of Unix seconds for each (cron, zone, first day, days)."""
    tick_lists = []
    for cron, zone, first, days in json.loads(question):
        timetable = CronTriggerTimetable(cron, timezone=zone)
        current_time = pendulum.instance(datetime.fromisoformat(first).replace(tzinfo=UTC))
        end, ticks = current_time + timedelta(days=days), []
        while (current_time := timetable._get_next(current_time)) < end:
            ticks.append(current_time.timestamp())
        tick_lists.append(ticks)
    print(json.dumps(tick_lists))


if __name__ == "__main__":
    main(sys.argv[1])
