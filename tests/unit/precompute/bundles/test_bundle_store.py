"""Which bundle a night takes: a host's folder, or what was handed over to the store that all hosts share."""

import errno
import hashlib
import itertools
import os
import shutil
from dataclasses import replace
from functools import partial

import orjson
import pytest

from cache.errors import BundleError, ConfigError, StoreError
from precompute.bundles import bundle_store
from precompute.bundles.bundle import BUNDLE_FILE, Bundle
from precompute.bundles.bundle_store import (
    all_handovers,
    bundle_made_of,
    bundles_from_tables,
    chosen_bundle,
    chosen_bundle_handed_over_at,
    hand_over,
    sweep_bundles,
)
from precompute.config.settings import NightConfig
from tests.models import train_small


@pytest.fixture
def host(tmp_path):
    """Makes hosts: each with folders of its own, all with one store."""
    return lambda name: NightConfig(artifacts=str(tmp_path / "store"), base=str(tmp_path / name), bundle="bundle")


def deliver(config, seed) -> str:
    """Another bundle in the host's folder; its digest."""
    folder = config.path(config.bundle)
    shutil.rmtree(folder, ignore_errors=True)
    return train_small(folder, dims=2 + seed).digest


def read_chosen_digest(config) -> str:
    with chosen_bundle(config) as bundle:
        bundle.verify()
        return bundle.digest


def test_a_host_without_a_bundle_takes_the_one_that_another_host_had(host):
    digest = deliver(host("a"), 1)
    with pytest.raises(ConfigError, match="there is no bundle at"):
        read_chosen_digest(host("b"))

    assert read_chosen_digest(host("a")) == digest == read_chosen_digest(host("b"))
    assert chosen_bundle_handed_over_at(host("b")) == all_handovers(host("b").store())[0].unix_ms / 1000


def test_a_folder_that_was_followed_by_another_bundle_is_not_gone_back_to(host, caplog):
    # Given last week's bundle on one host, and a newer one on another
    old = deliver(host("b"), 1)
    assert read_chosen_digest(host("b")) == old
    new = deliver(host("a"), 2)
    assert read_chosen_digest(host("a")) == new

    assert read_chosen_digest(host("b")) == new
    assert "hand-over" in caplog.text and old[:12] in caplog.text

    # When an operator hands the old one over on purpose
    hand_over(host("b").store(), Bundle.open(host("b").path("bundle")))
    assert read_chosen_digest(host("a")) == old == read_chosen_digest(host("b"))


def test_a_bundle_that_no_night_can_use_does_not_follow_one_that_nights_use(host):
    # Given a bundle that nights use, and a later one with a file that is not a model
    old = deliver(host("a"), 1)
    kept = host("a").path("kept")
    shutil.copytree(host("a").path("bundle"), kept)
    assert read_chosen_digest(host("a")) == old
    deliver(host("a"), 2)
    folder = host("a").path("bundle")
    (folder / "user_tower.onnx").write_bytes(b"no model")
    bundle_json = orjson.loads((folder / BUNDLE_FILE).read_bytes())
    bundle_json["user_tower"]["sha256"] = hashlib.sha256(b"no model").hexdigest()
    (folder / BUNDLE_FILE).write_bytes(orjson.dumps(bundle_json))

    # When a night tries it, and the first one is put back
    with pytest.raises(BundleError, match="user_tower"):
        read_chosen_digest(host("a"))
    shutil.rmtree(folder)
    kept.rename(folder)

    # Then nights use the first one
    assert read_chosen_digest(host("a")) == old and len(all_handovers(host("a").store())) == 1


def test_a_full_disk_under_the_copy_of_a_bundle_is_told_in_one_line(host, monkeypatch):
    def fill_disk(source, target):
        full = os.strerror(errno.ENOSPC)
        raise shutil.Error([(f"{source}/{name}", f"{target}/{name}", full) for name in "abc"])

    deliver(host("a"), 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", fill_disk)
        with pytest.raises(StoreError, match=r"No space left on device; free space, retire generations") as caught:
            read_chosen_digest(host("a"))

    assert caught.value.message.count("No space left") == 1 and len(caught.value.message) < 300
    assert read_chosen_digest(host("a"))


def test_handing_over_what_is_the_last_one_changes_nothing(host):
    deliver(host("a"), 1)
    assert read_chosen_digest(host("a")) == read_chosen_digest(host("a"))
    assert len(all_handovers(host("a").store())) == 1


def test_a_clock_that_went_back_does_not_make_an_older_bundle_the_last_one(host):
    store, times = host("a").store(), itertools.count(2_000, -1)
    for seed in (1, 2, 3):
        last = deliver(host("a"), seed)
        hand_over(store, Bundle.open(host("a").path("bundle")), clock=lambda: next(times))
    assert all_handovers(store)[-1].bundle_digest == last


def test_the_store_keeps_the_files_of_the_last_few_only(host, monkeypatch):
    monkeypatch.setattr(bundle_store, "KEPT_BUNDLES_MAX", 2)
    digests = []
    for seed in (1, 2, 3):
        deliver(host("a"), seed)
        digests.append(read_chosen_digest(host("a")))

    assert sweep_bundles(host("a").store()) == 1
    stored_digests = {name for name in host("a").store().names("bundles") if len(name) == 64}
    assert stored_digests == set(digests[1:])
    assert read_chosen_digest(host("b")) == digests[-1]


def test_a_bundle_that_was_altered_in_the_store_is_refused(host):
    digest = deliver(host("a"), 1)
    read_chosen_digest(host("a"))
    file = host("a").store().local(f"bundles/{digest}/user_tower.onnx")
    file.write_bytes(file.read_bytes() + b" ")

    with pytest.raises(BundleError, match="SHA-256"):
        read_chosen_digest(host("b"))


def test_a_remote_store_leaves_no_copy_of_a_bundle_on_a_host(host, tmp_path):
    remote = f"memory://{tmp_path.name}"
    a, b = (replace(host(name), artifacts=remote) for name in "ab")
    digest = deliver(a, 1)

    assert read_chosen_digest(a) == digest == read_chosen_digest(b)
    assert not list(tmp_path.rglob("bundles/*/*"))
    assert not list(tmp_path.rglob("*.part"))


def remake(_folder):
    pytest.fail("it is in the store")


def from_tables(config, sources, make=remake) -> str:
    with bundle_made_of(config.store(), sources, make) as bundle:
        bundle.verify()
        return bundle.digest


def test_a_bundle_that_was_made_of_tables_is_made_once_for_all_hosts(host, tmp_path):
    remote = f"memory://{tmp_path.name}"
    a, b = (replace(host(name), artifacts=remote) for name in "ab")

    digest = from_tables(a, "1" * 64, lambda folder: train_small(folder, dims=3))

    assert from_tables(b, "1" * 64) == from_tables(a, "1" * 64) == digest
    assert from_tables(b, "2" * 64, lambda folder: train_small(folder, dims=4)) != digest


def test_a_bundle_that_was_made_of_tables_follows_no_other(host):
    mine = deliver(host("a"), 1)
    assert read_chosen_digest(host("a")) == mine
    from_tables(host("a"), "1" * 64, lambda folder: train_small(folder, dims=7))

    assert read_chosen_digest(host("a")) == mine == read_chosen_digest(host("b"))
    assert len(all_handovers(host("a").store())) == 1


def test_bundles_made_of_tables_are_swept_with_their_records(host, monkeypatch):
    monkeypatch.setattr(bundle_store, "KEPT_BUNDLES_MAX", 2)
    store, times = host("a").store(), itertools.count(1_000)
    mine = deliver(host("a"), 1)
    assert read_chosen_digest(host("a")) == mine
    digests = []
    for number in range(3):
        make, clock = partial(train_small, dims=4 + number), partial(next, times)
        with bundle_made_of(store, f"{number}" * 64, make, clock=clock) as bundle:
            digests.append(bundle.digest)

    assert sweep_bundles(store) == 1

    assert {name for name in store.names("bundles") if len(name) == 64} == {mine, *digests[1:]}
    assert [bundle_record.bundle_digest for bundle_record in bundles_from_tables(store)] == digests[1:]
    assert from_tables(host("a"), "0" * 64, lambda folder: train_small(folder, dims=4)) == digests[0]
