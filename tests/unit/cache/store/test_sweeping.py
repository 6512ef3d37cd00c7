"""What killed programs and retired generations leave on a host, and what must not be taken along."""

import os
import shutil
import time
import uuid

import fsspec
import pytest

from cache.store.artefacts import ArtefactStore, last_change_time

OLD, LIVE, MAKING = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2, 3))


@pytest.fixture
def remote(tmp_path):
    """A remote store that has LIVE only, with copies of three generations on this host."""
    store = ArtefactStore(f"memory://larder-{uuid.uuid4().hex}", tmp_path / "host-cache")
    store.write(f"generations/{LIVE}/manifest.json", b"{}")
    for generation in (OLD, LIVE, MAKING):
        path = store.local(f"generations/{generation}/items/ids.bin")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"ids")
    return store


def test_copies_of_what_the_store_no_longer_has_go_and_others_stay(remote):
    later = time.time() + 60

    assert remote.sweep_host_copies([MAKING], cutoff_at=later) == [OLD]
    assert remote.host_copy_generations() == [LIVE, MAKING]
    assert remote.sweep_host_copies([MAKING], cutoff_at=later) == []


def test_a_copy_that_changed_lately_may_be_in_the_making_and_stays(remote):
    assert remote.sweep_host_copies([], cutoff_at=time.time() - 60) == []
    assert remote.host_copy_generations() == [OLD, LIVE, MAKING]


def test_a_store_that_shows_nothing_at_all_loses_no_copy(remote):
    fsspec.filesystem("memory").rm(f"{remote.url}/generations", recursive=True)

    assert remote.sweep_host_copies([], cutoff_at=time.time() + 60) == []


def test_a_local_store_has_no_copies(tmp_path):
    store = ArtefactStore(str(tmp_path))
    store.write(f"generations/{OLD}/manifest.json", b"{}")

    assert store.host_copy_generations() == []
    assert store.sweep_host_copies([], cutoff_at=time.time() + 60) == []
    assert store.names("generations") == [OLD]


def test_unfinished_files_and_bundles_of_killed_writers_go_once_they_are_old(tmp_path):
    store = ArtefactStore(str(tmp_path))
    store.write(f"generations/{OLD}/manifest.json", b"{}")
    unfinished_paths = [
        tmp_path / ".bundle.0a1b2c3d.part",
        tmp_path / f"generations/{OLD}/tables/.0000.pages.part",
        tmp_path / f"generations/{OLD}/.manifest.json.0a1b2c3d.part",
    ]
    unfinished_paths[0].mkdir()
    (unfinished_paths[0] / "bundle.json").write_bytes(b"{}")
    unfinished_paths[1].parent.mkdir()
    for path in unfinished_paths[1:]:
        path.write_bytes(b"half")

    assert store.sweep_unfinished(cutoff_at=time.time() - 60) == 0
    assert all(path.exists() for path in unfinished_paths)
    assert store.sweep_unfinished(cutoff_at=time.time() + 60) == 3
    assert not any(path.exists() for path in unfinished_paths)
    assert store.read(f"generations/{OLD}/manifest.json") == b"{}"


def test_a_copied_file_is_as_old_as_its_copy_not_as_its_original(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_bytes(b"x")
    os.utime(tmp_path / "old/file", (1, 1))
    shutil.copytree(tmp_path / "old", tmp_path / "new")

    assert last_change_time(tmp_path / "new") > time.time() - 60
    assert last_change_time(tmp_path / "none") == 0.0
