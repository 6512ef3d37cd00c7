"""Towers of a night, as they are opened."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache.model.tower import Tower
from precompute.scoring import towers


@pytest.mark.parametrize(("configured", "expected_threads"), [(0, 3), (2, 2)])
def test_a_tower_runs_on_as_many_threads_as_are_configured_or_may_be_used(
    monkeypatch: pytest.MonkeyPatch, configured: int, expected_threads: int
) -> None:
    opened: list[int] = []

    def record_open(_path: Path, _spec: object, *, threads: int) -> None:
        opened.append(threads)

    monkeypatch.setattr(towers, "usable_cores", lambda: 3)
    monkeypatch.setattr(towers, "fetch_model", lambda *_: Path("tower.onnx"))
    monkeypatch.setattr(Tower, "open", record_open)
    build: Any = SimpleNamespace(config=SimpleNamespace(threads=configured))
    model: Any = SimpleNamespace(spec=None, program_path=None)

    towers.open_tower(build, model, None)

    assert opened == [expected_threads]
