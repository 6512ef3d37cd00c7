"""Fixtures of the tests of `larder`."""

import pytest


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep outside settings away from a test, and undo what `larder` sets for its process."""
    for name in ("LARDER_CONFIG", "LARDER_NAMESPACE", "REDIS_URL"):
        monkeypatch.setenv(name, "")
