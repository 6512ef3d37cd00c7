"""Erasures: records that nobody slips through, what a night leaves out, and what counts as still holding it."""

import uuid

import numpy as np
import orjson
import pyarrow as pa
import pytest

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict, CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.store.erasures import Erasure, all_erasures, mark_done, mark_forgotten, request_erasure
from precompute.builds.build import record_copies
from precompute.erasure.erasing import readmit_entity
from precompute.erasure.holders import (
    declare_hosts_gone,
    holders_by_erasure_number,
    note_left_out,
    sweep_left_out_notes,
)
from precompute.sources.columns import Ids
from precompute.sources.erasures import NO_ERASURES, ErasedEntities
from precompute.sources.readers import Interactions

G1, G2, G3 = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2, 3))


@pytest.fixture
def store(tmp_path):
    return ArtefactStore(f"memory://larder-{uuid.uuid4().hex}", tmp_path)


def host_of(store: ArtefactStore) -> str:
    assert store.copies is not None
    return store.copies.host_id


def batch(*pairs: tuple[str, str]) -> Interactions:
    users, items = (Ids.of(pa.array([pair[side] for pair in pairs])) for side in (0, 1))
    return Interactions(users, items, np.arange(len(pairs), dtype=np.int64))


def test_a_request_is_written_once_and_read_back_whole(store):
    first = request_erasure(store, b"u1", "user", requested_at=5.0)
    item = request_erasure(store, b"u1", "item", requested_at=6.0, was_blocked=True)

    assert request_erasure(store, b"u1", "user", requested_at=7.0) == first
    assert all_erasures(store) == [first, item]
    mark_done(store, first, done_at=8.0)
    mark_done(store, first, done_at=9.0)
    mark_forgotten(store, item, forgotten_at=10.0, reason="a mistake")
    done_erasure, forgotten = all_erasures(store)
    assert (done_erasure.done_at, done_erasure.is_in_force, done_erasure.is_pending) == (8.0, True, False)
    assert (forgotten.reason, forgotten.is_in_force) == ("a mistake", False)
    assert request_erasure(store, b"u1", "item", requested_at=11.0).number == 3


def test_forgetting_needs_a_reason(store):
    request_erasure(store, b"u1", "user", requested_at=5.0)

    with pytest.raises(ConfigError, match="--reason"):
        readmit_entity(store, b"u1", "user", forgotten_at=6.0, reason=" ")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"number": 2, "entity": "u", "kind": "user", "at": 1}'])
def test_a_damaged_record_stops_the_night_instead_of_losing_an_erasure(store, raw):
    store.write("erasures/000000000001.json", raw)

    with pytest.raises(CorruptArtefact):
        all_erasures(store)


def test_a_night_leaves_out_erased_users_and_whatever_was_done_with_erased_items(store):
    erased = ErasedEntities(frozenset({b"u1"}), frozenset({b"i9"}))

    remaining_interactions = erased.leave_out(batch(("u1", "i1"), ("u2", "i9"), ("u2", "i1"), ("i9", "u1")))

    assert remaining_interactions.user_ids.distinct_raw_ids() == [
        b"u2",
        b"i9",
    ] and remaining_interactions.user_ids.id_codes.tolist() == [0, 1]
    assert remaining_interactions.item_ids.row_texts().to_pylist() == ["i1", "u1"]
    assert remaining_interactions.times_us.tolist() == [2, 3]
    assert erased.kept_users_mask(Ids.of(pa.array(["u1", "u2"]))).tolist() == [False, True]
    everything = batch(("u1", "i9"))
    assert NO_ERASURES.leave_out(everything) is everything


def test_another_set_of_erasures_is_another_input_and_none_changes_no_name():
    users = ErasedEntities(frozenset({b"a", b"b"}))

    assert NO_ERASURES.digest("d") == "d"
    assert users.digest("d") == ErasedEntities(frozenset({b"b", b"a"}), numbers=(7,)).digest("d")
    digests = {
        erased_entities.digest("d")
        for erased_entities in (
            users,
            ErasedEntities(frozenset({b"ab"})),
            ErasedEntities(items=frozenset({b"a", b"b"})),
        )
    }
    assert len(digests) == 3


def test_forgotten_ones_are_not_left_out_and_done_ones_are():
    erasures = [
        Erasure(1, "a", "user", 0.0, done_at=1.0),
        Erasure(2, "b", "user", 0.0, forgotten_at=1.0),
        Erasure(3, "c", "item", 0.0),
    ]

    assert ErasedEntities.of(erasures) == ErasedEntities(frozenset({b"a"}), frozenset({b"c"}), (1, 3))


def test_an_unreadable_generation_counts_as_holding_the_entity(store, tmp_path):
    """Being made, damaged, or without the files to look into; but not one that says it left the entity out."""
    erasure = request_erasure(store, b"u1", "user", requested_at=5.0)
    begin_report = {"user_seed": 0, "item_seed": 0, "bounds": [0, 1]}
    store.write(f"generations/{G1}/work/begin.json", orjson.dumps({**begin_report, "erased": [1]}))
    store.write(f"generations/{G2}/work/begin.json", orjson.dumps(begin_report))
    store.write(f"generations/{G3}/manifest.json", b"damaged")
    making, copied = f"20260104T000000Z-{'0' * 12}", f"20260105T000000Z-{'0' * 12}"
    store.local(f"generations/{copied}").mkdir(parents=True)
    rows = {
        making: RegistryRow(GenerationState.BEGUN, 0.0),
        f"20260106T000000Z-{'0' * 12}": RegistryRow(GenerationState.RETIRED, 0.0),
    }

    (entity_holders,) = holders_by_erasure_number(store, [erasure], rows).values()

    assert [(holder.generation, holder.is_copy) for holder in entity_holders] == [
        (G2, False), (G3, False), (making, False), (copied, True),
    ]  # fmt: skip


def test_a_user_of_the_same_id_does_not_hold_an_erased_item(store):
    # Given a generation without the item, and no readable file of its users
    erasure = request_erasure(store, b"ann", "item", requested_at=5.0)
    begin_report = {"user_seed": 0, "item_seed": 0, "bounds": [0, 1]}
    store.write(f"generations/{G1}/work/begin.json", orjson.dumps(begin_report))
    store.write(f"generations/{G1}/directory/item/0000.u64", np.array([7], "<u8").tobytes())
    store.write(f"generations/{G1}/work/holdout.json", orjson.dumps({"ann": ["i1"]}))

    # When it is asked whether it holds the item
    (entity_holders,) = holders_by_erasure_number(store, [erasure], {}).values()

    # Then the users are not read
    assert entity_holders == ()


def test_copies_of_a_generation_that_is_gone_hold_whom_it_did_not_leave_out(store, tmp_path):
    """Else each night's retirement, whose copies other hosts still have, would keep every erasure pending for ever."""
    earlier_erasure, after = (request_erasure(store, raw, "user", requested_at=5.0) for raw in (b"u1", b"u2"))
    other_store = ArtefactStore(store.url, tmp_path / "other host")
    note_left_out(store, G1, ErasedEntities.of([earlier_erasure]))
    record_copies(other_store, G1)

    holders_by_number = holders_by_erasure_number(store, [earlier_erasure, after], {})

    assert not holders_by_number[earlier_erasure.number]
    assert [(holder.generation, holder.host) for holder in holders_by_number[after.number]] == [
        (G1, host_of(other_store))
    ]


def test_a_host_that_is_gone_for_good_is_declared_gone(store, tmp_path):
    erasure = request_erasure(store, b"u1", "user", requested_at=5.0)
    pods = [ArtefactStore(store.url, tmp_path / f"pod-{number}") for number in range(3)]
    for pod in pods:
        record_copies(pod, G1)
    note_left_out(store, G2, NO_ERASURES)
    with pytest.raises(Conflict, match="no copy is recorded for a host 'worker-9'"):
        declare_hosts_gone(store, "worker-9")

    gone_copies = declare_hosts_gone(store, "*")

    assert {copy.host for copy in gone_copies} == {host_of(pod) for pod in pods}
    assert not holders_by_erasure_number(store, [erasure], {})[erasure.number]
    note_left_out(store, G1, NO_ERASURES)
    sweep_left_out_notes(store, needed_generations=[G2])
    assert store.names("copies") == [G2]
