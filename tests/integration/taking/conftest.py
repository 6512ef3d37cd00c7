"""Months of nights with events, drawn by a seed that is printed."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.changed.month import Month
from tests.integration.changed.worlds import WORLDS
from tests.integration.taking.clicking import with_events

USERS, ITEMS = 120, 90


@pytest.fixture
def seed() -> int:
    """Seed of everything random in these tests."""
    seed_value = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed_value} (LARDER_SEED={seed_value} repeats it)")
    return seed_value


@pytest.fixture(params=["reference", "features"])
def month(request: Any, tmp_path: Path, redis_url: str, seed: int) -> Month:
    """A month of each kind of bundle."""
    drawn_month = WORLDS[request.param](tmp_path / "night", redis_url, seed, users=USERS, items=ITEMS)
    return with_events(drawn_month, redis_url)


@pytest.fixture
def featured(tmp_path: Path, redis_url: str, seed: int) -> Month:
    """A month of a user tower that takes features."""
    drawn_month = WORLDS["features"](tmp_path / "night", redis_url, seed, users=60, items=ITEMS)
    return with_events(drawn_month, redis_url)
