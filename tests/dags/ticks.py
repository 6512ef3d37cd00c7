"""Print when Airflow would run each cron of an argument in each zone; run in a process of its own."""

import json
import sys
from datetime import UTC, datetime, timedelta

import pendulum
from airflow.timetables.trigger import CronTriggerTimetable


def main(question: str) -> None:
    """One list of Unix seconds per (cron, zone, first day, days)."""
    found = []
    for cron, zone, first, days in json.loads(question):
        timetable = CronTriggerTimetable(cron, timezone=zone)
        now = pendulum.instance(datetime.fromisoformat(first).replace(tzinfo=UTC))
        end, ticks = now + timedelta(days=days), []
        while (now := timetable._get_next(now)) < end:
            ticks.append(now.timestamp())
        found.append(ticks)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
