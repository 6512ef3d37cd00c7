"""Checksums of files that stay as they are."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from cache.store.artefacts import sha256_of
from precompute.bundles import bundle
from precompute.bundles.bundle import sha256_of_unchanged


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really read; the clock says that they have rested long enough."""
    read_paths: list[Path] = []

    def read(path: Path) -> str:
        read_paths.append(path)
        return sha256_of(path)

    monkeypatch.setattr(bundle, "sha256_of", read)
    bundle._digest_by_stamp.clear()
    monkeypatch.setattr(bundle, "SETTLED_AFTER_NS", -(10**12))
    return read_paths


def digest(raw: bytes) -> str:
    return sha256(raw).hexdigest()


def test_a_file_that_rests_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    assert [sha256_of_unchanged(path) for _ in range(3)] == [digest(b"weights")] * 3
    assert reads == [path]


def test_a_file_that_changed_is_read_again_whatever_times_it_shows(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    sha256_of_unchanged(path)

    while path.stat().st_ctime_ns - times[1] < 20_000_000:  # another tick of the kernel's clock
        path.write_bytes(b"WEIGHTS")
        os.utime(path, ns=times)

    assert sha256_of_unchanged(path) == digest(b"WEIGHTS")


def test_another_file_in_its_place_is_read(tmp_path: Path, reads: list[Path]) -> None:
    path, other_file = tmp_path / "model", tmp_path / "other"
    path.write_bytes(b"weights")
    sha256_of_unchanged(path)
    other_file.write_bytes(b"WEIGHTS")
    os.utime(other_file, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other_file.replace(path)
    assert sha256_of_unchanged(path) == digest(b"WEIGHTS")


def test_what_was_written_just_now_is_not_taken_for_granted(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SETTLED_AFTER_NS", 10**12)
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    assert sha256_of_unchanged(path) == sha256_of_unchanged(path) == digest(b"weights")
    assert reads == [path, path]


def test_only_so_many_are_remembered(tmp_path: Path, reads: list[Path]) -> None:
    paths = [tmp_path / str(number) for number in range(bundle.REMEMBERED_DIGESTS_MAX + 1)]
    for path in paths:
        path.write_bytes(path.name.encode())
        sha256_of_unchanged(path)
    assert len(bundle._digest_by_stamp) == bundle.REMEMBERED_DIGESTS_MAX
    sha256_of_unchanged(paths[0])
    assert reads == [*paths, paths[0]]
