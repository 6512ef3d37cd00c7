"""Fixtures of the tests of `larder`."""

import pytest


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings from outside do not reach a test, and what `larder` finds for its process ends with it."""
    for name in ("LARDER_CONFIG", "LARDER_NAMESPACE", "REDIS_URL"):
        monkeypatch.setenv(name, "")
