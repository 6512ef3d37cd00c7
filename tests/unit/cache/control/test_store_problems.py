"""The store that belongs to a Redis, and the disk that it lies on."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.control import store_problems
from cache.control.store_problems import full_store_problem
from cache.store.artefacts import ArtefactStore


@pytest.mark.parametrize(("free_bytes", "is_full"), [(0, True), ((1 << 20) - 1, True), (1 << 20, False)])
def test_a_full_disk_under_the_store_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, is_full: bool
) -> None:
    monkeypatch.setattr(store_problems, "disk_free_bytes", lambda _folder: free_bytes)

    problem = full_store_problem(ArtefactStore(str(tmp_path)))

    assert (problem is not None) is is_full
    if problem is not None:
        assert str(tmp_path) in problem and f"{free_bytes:,} bytes are free" in problem and "make room" in problem


def test_a_file_system_that_is_mounted_read_only_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_problems, "disk_free_bytes", lambda _folder: 0)
    monkeypatch.setattr(os, "statvfs", lambda _folder: SimpleNamespace(f_flag=os.ST_RDONLY))

    assert full_store_problem(ArtefactStore(str(tmp_path))) is None


def test_a_store_elsewhere_has_no_disk_here(tmp_path: Path) -> None:
    assert full_store_problem(ArtefactStore("memory://store", tmp_path)) is None
