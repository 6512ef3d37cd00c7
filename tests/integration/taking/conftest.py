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
    """Seed of all that is drawn."""
    found = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {found} (LARDER_SEED={found} repeats it)")
    return found


@pytest.fixture(params=["reference", "features"])
def month(request: Any, tmp_path: Path, redis_url: str, seed: int) -> Month:
    """Month of each kind of bundle."""
    made = WORLDS[request.param](tmp_path / "night", redis_url, seed, users=USERS, items=ITEMS)
    return with_events(made, redis_url)


@pytest.fixture
def featured(tmp_path: Path, redis_url: str, seed: int) -> Month:
    """Month of a user tower that takes features."""
    made = WORLDS["features"](tmp_path / "night", redis_url, seed, users=60, items=ITEMS)
    return with_events(made, redis_url)
