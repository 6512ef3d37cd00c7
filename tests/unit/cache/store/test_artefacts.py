"""The artefact store, local and remote."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from cache.errors import CorruptArtefact, StoreError, UnknownGeneration
from cache.store.artefacts import ArtefactStore, check_file, describe_file, generation_path, link_or_copy_file
from cache.store.blocklist import Blocklist, change_blocklist, latest_blocklist
from cache.store.releases import Release, all_releases, done_path, intent_path, newest_release, released_manifest_digest


@pytest.fixture(params=["local", "remote"])
def store(request, tmp_path):
    if request.param == "local":
        return ArtefactStore(str(tmp_path / "artefacts"))
    return ArtefactStore(f"memory://larder-{uuid.uuid4().hex}", tmp_path / "host-cache")


def test_a_file_is_written_read_listed_and_deleted(store):
    assert store.read("a/b.json") is None
    store.write("a/b.json", b"1")
    store.write("a/b.json", b"2")
    assert store.read("a/b.json") == b"2"
    assert store.names("a") == ["b.json"]
    store.delete("a")
    store.delete("a")
    assert store.read("a/b.json") is None and store.names("a") == []


def test_what_is_written_once_is_never_replaced(store):
    assert store.write_once("releases/1.json", b"first")
    assert not store.write_once("releases/1.json", b"second")
    assert store.read("releases/1.json") == b"first"


def test_unfinished_files_are_not_listed(tmp_path):
    store = ArtefactStore(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".x.part").write_bytes(b"")
    assert store.names("a") == []


def test_a_remote_file_is_fetched_once_and_a_finished_one_is_put(tmp_path):
    store = ArtefactStore(f"memory://larder-{uuid.uuid4().hex}", tmp_path)
    store.write("generations/x/file", b"data")
    assert store.fetch("generations/x/file").read_bytes() == b"data"
    store.local("generations/x/other").write_bytes(b"more")
    store.put("generations/x/other")
    assert store.read("generations/x/other") == b"more"
    with pytest.raises(StoreError):
        store.fetch("generations/x/nothing")


def test_a_remote_store_needs_a_folder_on_this_host():
    with pytest.raises(StoreError):
        ArtefactStore("memory://x")


def test_a_file_that_changed_is_refused_by_size_and_by_checksum(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    artefact = describe_file(tmp_path, "f")
    check_file(tmp_path, artefact)
    for wrong in (b"abcd", b"abd"):
        (tmp_path / "f").write_bytes(wrong)
        with pytest.raises(CorruptArtefact):
            check_file(tmp_path, artefact)
    (tmp_path / "f").unlink()
    with pytest.raises(CorruptArtefact, match="missing"):
        check_file(tmp_path, artefact)


@pytest.mark.parametrize("name", ["../../etc", "", "20260101T000000Z-xyz", "20260101T000000Z-0123456789ab/.."])
def test_a_malformed_generation_id_never_becomes_a_path(name):
    with pytest.raises(UnknownGeneration):
        generation_path(name)


def release(epoch, generation, action="publish"):
    return Release(epoch, action, generation, None, f"attempt-{epoch}", 1.0)


def test_only_a_completed_move_is_the_newest_release(store):
    for epoch, generation in ((9, "a"), (10, "b"), (11, "c")):
        assert store.write_once(intent_path(epoch), release(epoch, generation).to_bytes())
    store.write_once(done_path(9), b"")
    store.write_once(done_path(10), b"")
    store.write_once(intent_path(12), release(12, "z", "refuse").to_bytes())

    latest_release = newest_release(store)

    assert latest_release is not None and latest_release.generation == "b"
    assert [release_record.epoch for release_record in all_releases(store)] == [9, 10, 11, 12]


def test_blocking_adds_a_version_and_unblocking_another(store):
    assert latest_blocklist(store) == Blocklist()
    assert change_blocklist(store, block_items=[b"x"], block_entities=[b"u"]).version == 1
    assert change_blocklist(store, block_items=[b"x"]).version == 1
    changed_blocklist = change_blocklist(store, unblock_items=[b"x"], block_items=[b"y"])
    assert changed_blocklist == Blocklist(2, frozenset({b"y"}), frozenset({b"u"}))
    assert latest_blocklist(store) == changed_blocklist


def test_stray_files_next_to_releases_and_blocklists_are_ignored(store):
    assert store.write_once(intent_path(9), release(9, "a").to_bytes())
    change_blocklist(store, block_items=[b"x"])
    for name in ("notes.json", "9 copy.json", "²³.json", "-1.json", "99.json~", "7_0.json"):
        store.write(f"releases/{name}", b"{}")
        store.write(f"blocklist/{name}", b"{}")
    store.write("blocklist/77.json", b"{}")

    assert [release_record.epoch for release_record in all_releases(store)] == [9]
    assert latest_blocklist(store).items == {b"x"}
    assert change_blocklist(store, block_items=[b"y"]).version == 2


def test_the_released_manifest_is_the_newest_published_or_verified_one(store):
    history = [
        replace(release(1, "a"), manifest_sha256="one", is_done=True),
        replace(release(2, "a", "verify"), manifest_sha256="two"),
        replace(release(3, "a"), manifest_sha256="three"),
        replace(release(4, "a", "pin"), manifest_sha256="four"),
        replace(release(5, "b", "verify"), manifest_sha256="five"),
        release(6, "a", "verify"),
    ]
    assert released_manifest_digest(history, "a") == "two"
    assert released_manifest_digest(history[:1], "a") == "one" and released_manifest_digest([], "a") == ""


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_taken_under_another_name(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    source, path = tmp_path / "a", tmp_path / "folder/b"
    source.write_bytes(b"weights")
    for _ in range(2):  # a repeat finds its own work
        link_or_copy_file(source, path)
    source.unlink()

    assert path.read_bytes() == b"weights"
    assert [file.name for file in path.parent.iterdir()] == ["b"]


def no_links(self, target):
    raise PermissionError("this file system has no links")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    """Never written in place."""
    store = ArtefactStore(str(tmp_path))
    store.write("index", b"old")

    def fail(_descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("cache.store.artefacts.os.fsync", fail)
    with pytest.raises(StoreError, match="disk full"):
        store.write("index", b"new")
    assert store.read("index") == b"old" and store.names("") == ["index"]
