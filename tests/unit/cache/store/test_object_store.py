"""Stores that are not AWS S3, and folders that are not disks: proven before they are trusted, told in our own words."""

import errno
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from cache.errors import StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.object_store import without_secrets
from tests.object_stores import Forgetful, Odd, Overwriting, PreconditionFailed, Stale, failing, store_of


def test_a_store_that_lets_the_last_writer_win_is_refused_by_name(tmp_path):
    store = store_of(Overwriting, tmp_path)

    for _ in range(2):  # not only the first time
        with pytest.raises(StoreError, match=r"Overwriting, does not create objects.*If-None-Match"):
            store.write_once("releases/1.json", b"first")
    with pytest.raises(StoreError, match="could be created twice"):
        store.demand_write_once()

    assert store.read("releases/1.json") is None


def test_a_refusal_reported_by_an_error_of_the_drivers_own_is_a_refusal(tmp_path):
    store = store_of(Odd, tmp_path)

    assert store.write_once("releases/1.json", b"first")
    assert not store.write_once("releases/1.json", b"second")
    assert store.read("releases/1.json") == b"first"
    # A create whose reply was lost, and that is retried, has succeeded.
    assert store.write_once("releases/1.json", b"first")


def test_what_was_created_and_is_not_there_is_an_error_and_no_success(tmp_path):
    with pytest.raises(StoreError, match="does not have the content that was just written"):
        store_of(Forgetful, tmp_path).write_once("releases/1.json", b"ours")


def test_a_listing_made_before_does_not_say_what_exists(tmp_path):
    store = store_of(Stale, tmp_path)
    Stale.listed_paths.add(Stale._strip_protocol(f"{store.url}/releases/1.json"))

    assert store.write_once("releases/1.json", b"first")
    assert not store.write_once("releases/1.json", b"second")


def test_every_error_of_a_driver_becomes_one_of_larder_with_the_path_and_without_secrets(tmp_path):
    store = store_of(Odd, tmp_path)
    store.write("generations/x/file", b"data")
    error = PreconditionFailed(
        "403 https://account.blob.core.windows.net/c/x?sv=2024&sig=SECRET1 (aws_secret_access_key='SECRET2', "
        "Authorization: Bearer SECRET3, proxy http://user:SECRET4@host)"
    )
    for act in (
        lambda: store.read("generations/x/file"),
        lambda: store.read_many(["generations/x/file"]),
        lambda: store.write("generations/x/file", b""),
        lambda: store.write_once("generations/x/file", b"other"),
        lambda: store.names("generations/x/file"),
        lambda: store.delete("generations/x/file"),
        lambda: store.fetch("generations/x/file"),
        lambda: store.put("generations/x/file"),
    ):
        store.local("generations/x").mkdir(parents=True, exist_ok=True)
        with failing(error), pytest.raises(StoreError) as caught:
            act()
        traceback_text = "".join(traceback.format_exception(caught.value))
        assert "generations/x/file" in traceback_text and "PreconditionFailed: 403" in traceback_text
        assert "SECRET" not in traceback_text


@pytest.mark.parametrize("answers", [{}, {"elsewhere/a": b"one"}])
def test_what_a_driver_leaves_out_of_many_is_asked_for_singly(tmp_path, monkeypatch, answers):
    store = store_of(Odd, tmp_path)
    store.write("a", b"one")
    monkeypatch.setattr(Odd, "cat", lambda *_arguments, **_more: answers)

    assert store.read_many(["a", "b"]) == {"a": b"one"}


def test_a_url_with_a_password_is_never_shown_with_it(tmp_path):
    store = store_of(Odd, tmp_path, url="odd://user:hunter2@bucket/larder")

    with failing(ValueError("no")), pytest.raises(StoreError) as caught:
        store.read("a")

    assert "hunter2" not in caught.value.message + store.url
    assert without_secrets("s3://bucket/key/file.json: no such key") == ("s3://bucket/key/file.json: no such key")


def test_an_error_without_secrets_keeps_its_cause(tmp_path):
    error = PreconditionFailed("slow down")

    with failing(error), pytest.raises(StoreError) as caught:
        store_of(Odd, tmp_path).read("a")

    assert caught.value.__cause__ is error


def test_a_driver_that_is_not_installed_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="cannot open the artefact store nosuch://x"):
        ArtefactStore("nosuch://x", tmp_path).read("a")


def no_links(_source, _target):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_hard_links_a_copy_is_fetched_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.store.artefacts.os.link", no_links)
    store = store_of(Odd, tmp_path)
    store.write("generations/x/file", b"data")

    assert store.fetch("generations/x/file").read_bytes() == b"data"
    assert [file.name for file in store.local("generations/x").iterdir()] == ["file"]


def test_without_hard_links_nothing_is_written_once_and_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.store.artefacts.os.link", no_links)
    store = ArtefactStore(str(tmp_path))

    with pytest.raises(StoreError, match=r"no hard links.*put `artifacts` on one that has"):
        store.demand_write_once()

    assert not list(tmp_path.rglob("*"))


def test_where_records_can_be_written_once_asking_leaves_nothing_to_list(tmp_path):
    store = ArtefactStore(str(tmp_path))

    for _ in range(2):
        store.demand_write_once()

    assert store.names("") == []


def test_a_fetch_outlives_a_sweep_of_its_folder(tmp_path, monkeypatch):
    store = store_of(Odd, tmp_path)
    store.write("generations/x/file", b"data")
    get: Any = Odd.get_file
    swept: set[Path] = set()

    def sweep_meanwhile(self, path, to, **more):
        get(self, path, to, **more)
        if not swept:
            swept.add(store.local("generations/x").rename(tmp_path / "swept"))

    monkeypatch.setattr(Odd, "get_file", sweep_meanwhile)

    assert store.fetch("generations/x/file").read_bytes() == b"data" and swept
