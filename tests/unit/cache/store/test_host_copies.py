"""Hosts that share a store and nothing else: what each has copies of stands in the store until it is gone."""

import pytest

from cache.store.artefacts import COPIES_FOLDER, ArtefactStore
from tests.object_stores import Counting, Odd, PreconditionFailed, failing, requests, store_of

OLD, LIVE = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2))
LATER = 4_000_000_000.0


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with copies of OLD and LIVE, of which the store has LIVE only."""
    first = store_of(Odd, tmp_path / "first")
    second = ArtefactStore(f"odd://{first.url.removeprefix('odd://')}", tmp_path / "second")
    for generation in (OLD, LIVE):
        first.write(f"generations/{generation}/items/ids.bin", b"ids")
        for host in (first, second):
            host.fetch(f"generations/{generation}/items/ids.bin")
    Odd().rm(f"{first.url}/generations/{OLD}", recursive=True)
    return first, second


def recorded(store: ArtefactStore, generation: str) -> list[str]:
    return store.names(f"{COPIES_FOLDER}/{generation}")


def test_every_host_is_recorded_before_its_copies_come_and_until_they_are_gone(hosts):
    first, second = hosts
    names = sorted(f"{host_store.copies.host_id}.json" for host_store in hosts)
    assert recorded(first, OLD) == recorded(first, LIVE) == names

    assert first.sweep_host_copies([], cutoff_at=LATER) == [OLD]

    assert first.host_copy_generations() == [LIVE] and second.host_copy_generations() == [OLD, LIVE]
    assert recorded(first, OLD) == [f"{second.copies.host_id}.json"]
    assert recorded(first, LIVE) == names


def test_a_host_keeps_its_name_when_a_program_starts_anew(hosts, tmp_path, monkeypatch):
    original_host_name = hosts[0].copies.host_id
    monkeypatch.setattr("socket.gethostname", lambda: "another/one")

    first, third = (store_of(Odd, tmp_path / folder).copies for folder in ("first", "third"))

    assert first is not None and first.host_id == original_host_name
    assert third is not None and third.host_id.startswith("another-one-")


def test_a_sweep_that_died_or_could_not_write_is_taken_up_again(hosts):
    first, _ = hosts
    name = f"{first.copies.host_id}.json"
    with failing(PreconditionFailed("403")):
        assert not first.copies.drop(OLD)
    assert first.host_copy_generations() == [OLD, LIVE] and name in recorded(first, OLD)
    assert not first.local(f"generations/{OLD}/items").exists()

    assert first.sweep_host_copies([], cutoff_at=LATER) == [OLD]

    assert name not in recorded(first, OLD) and first.host_copy_generations() == [LIVE]


def test_mapped_files_outlive_the_sweep(hosts):
    first, _ = hosts
    with first.local(f"generations/{OLD}/items/ids.bin").open("rb") as file:
        first.sweep_host_copies([], cutoff_at=LATER)

        assert file.read() == b"ids"


def test_copies_of_an_earlier_version_are_recorded_by_the_next_sweep(hosts):
    first, _ = hosts
    name = f"{first.copies.host_id}.json"
    first.delete(f"{COPIES_FOLDER}/{LIVE}/{name}")
    first.local(f"generations/{LIVE}/.recorded").unlink()

    first.sweep_host_copies([], cutoff_at=LATER)

    assert name in recorded(first, LIVE)


def test_who_may_only_read_the_store_fetches_all_the_same_and_asks_once(tmp_path, monkeypatch):
    store = store_of(Odd, tmp_path)
    for name in ("a", "b"):
        store.write(f"generations/{LIVE}/{name}", b"data")
    refused = []

    def refuse(self, path, *_arguments, **_more):
        refused.append(path)
        raise PreconditionFailed("403")

    monkeypatch.setattr(Odd, "pipe_file", refuse)

    assert [store.fetch(f"generations/{LIVE}/{name}").read_bytes() for name in "ab"] == [b"data"] * 2
    assert len(refused) == 1


def test_what_ends_with_its_program_is_not_recorded(tmp_path):
    store = store_of(Odd, tmp_path)
    store.write(f"generations/{LIVE}/a", b"data")
    pod = ArtefactStore(store.url, tmp_path / "pod", is_ephemeral=True)

    pod.fetch(f"generations/{LIVE}/a")

    assert not recorded(store, LIVE)


def test_retiring_takes_the_copies_and_the_record_of_its_own_host_along(hosts):
    first, second = hosts

    first.delete(f"generations/{LIVE}")

    assert recorded(first, LIVE) == [f"{second.copies.host_id}.json"]
    assert first.host_copy_generations() == [OLD] and second.host_copy_generations() == [OLD, LIVE]


def test_sweeping_costs_one_listing_and_nothing_where_nothing_is_to_be_swept(tmp_path):
    store = store_of(Counting, tmp_path)
    store.write(f"generations/{LIVE}/a", b"data")
    store.fetch(f"generations/{LIVE}/a")

    with requests() as request_counts:
        store.sweep_host_copies([LIVE], cutoff_at=LATER)
        assert not sum(request_counts.values())
        store.sweep_host_copies([], cutoff_at=LATER)
        assert dict(request_counts) == {"list": 1}
