"""Fixtures of nights that copy: a seed that is printed, and a world that is prepared once and copied."""

import os
import random

import pytest


@pytest.fixture
def seed() -> int:
    """Seed of all that is drawn."""
    found = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {found} (LARDER_SEED={found} repeats it)")
    return found
