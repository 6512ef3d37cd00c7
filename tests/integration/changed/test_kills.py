"""kill -9 at random points of nights that copy: each, run again, has the bytes of a full night."""

import random
from functools import partial
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from precompute.builds.reports import BEGIN_REPORT
from tests.integration.changed.events import ITEMS_REMOVED, STOCK, USUAL
from tests.integration.changed.month import Month
from tests.integration.changed.worlds import reference
from tests.integration.killed_steps import night
from tests.integration.killing import run


@pytest.fixture
def month(tmp_path: Path, own_redis: RedisServer, seed: int) -> Month:
    """A month whose first night is published."""
    prepared_month = reference(tmp_path / "night", own_redis.url, seed, users=200)
    prepared_month.publish()
    return prepared_month


def next_night(month: Month) -> partial[dict[str, str]]:
    """The night after a day on which users did something, an item left and others are in stock."""
    month.night += 1
    for event in (USUAL, STOCK, *([ITEMS_REMOVED] if month.night % 2 else [])):
        event.happen(month)
    return partial(night, month.config, month.cut.isoformat(), f"night-{month.night}")


def survive(month: Month, seed: int, kills: int) -> None:
    """Nights that are killed again and again, so many times in all, and that end as full ones."""
    undisturbed, moments, died = run(next_night(month)), random.Random(seed), 0
    assert undisturbed is not None
    month.generations.append(undisturbed.result["generation"])
    while died < kills:
        work = next_night(month)
        for _ in range(4):
            died += run(work, undisturbed.point(moments)) is None
        completed_run = run(work)
        assert completed_run is not None
        month.generations.append(completed_run.result["generation"])
        assert month.differences(month.generations[-1], month.compute()) == []
        base_note = month.build(month.generations[-1]).need_report(BEGIN_REPORT)["base"]
        assert month.reasons(month.generations[-1]).get("copied"), (month.night, died, base_note)
    print(f"killed {died} times")


def test_a_killed_night_that_copies_ends_as_a_full_one(month: Month, seed: int) -> None:
    survive(month, seed, kills=4)


@pytest.mark.storm
def test_a_hundred_kills_leave_no_trace(month: Month, seed: int) -> None:
    survive(month, seed, kills=100)
