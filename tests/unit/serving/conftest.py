"""Fixture: a replica to publish to."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.serving.scene import Scene


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A replica with a store in which nothing was ever blocked."""
    scene = Scene(tmp_path)
    scene.store.write("generations/some", b"")
    await scene.refresher.refresh_blocklist()
    yield scene
    await scene.follower.aclose()
