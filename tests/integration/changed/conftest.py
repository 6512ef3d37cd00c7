"""Fixtures of nights that copy: a seed that is printed, and a world that is prepared once and copied."""

import os
import random

import pytest

from tests.integration.changed import planted_worlds
from tests.integration.changed.prepared import Prepared


@pytest.fixture
def seed() -> int:
    """Seed of everything random in these tests."""
    drawn_seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {drawn_seed} (LARDER_SEED={drawn_seed} repeats it)")
    return drawn_seed


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> dict[str, Prepared]:
    """Worlds of `planted_worlds`, each made once."""
    return planted_worlds.prepared(lambda: tmp_path_factory.mktemp("planted") / "night", redis_url)
