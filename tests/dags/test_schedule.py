"""The service expects a generation exactly when Airflow would start a night, whatever the clocks do."""

import itertools
import json
from itertools import pairwise
from pathlib import Path

import pytest

from cache.config.timetable import Schedule
from tests.dags.test_parse import in_airflow

CRONS = ("0 3 * * *", "30 2 * * *", "*/30 * * * *", "0 */2 * * *", "30 1-4 * * *", "0 0 * * 0")
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC")
SPANS = (("2026-03-01", 40), ("2026-10-20", 16))
CASES = list(itertools.product(CRONS, ZONES, SPANS))


@pytest.fixture(scope="module")
def ticks(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Airflow's own ticks of every case."""
    script = Path(__file__).with_name("ticks.py")
    question = [[cron, zone, *span] for cron, zone, span in CASES]
    home = tmp_path_factory.mktemp("airflow")
    airflow_ticks: list[list[float]] = json.loads(in_airflow(home, str(script), json.dumps(question)).splitlines()[-1])
    return airflow_ticks


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number][:2]))
def test_ticks_are_airflows_also_where_clocks_change(number: int, ticks: list[list[float]]) -> None:
    cron, zone, _ = CASES[number]
    schedule = Schedule(cron, zone)

    assert len(ticks[number]) >= 2
    for tick, following in pairwise(ticks[number]):
        for now_s in (tick, tick + 1, following - 1):
            assert schedule.tick_before(now_s) == tick
