"""Users of a hash range, copied or computed: put together as a naive merge does it."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cache.model.tower import Histories
from precompute.builds.reuse_fact import COPIED, ENTERED, INPUTS, LOST
from precompute.partitions.shard_input import ShardInput
from precompute.reuse.copied import Copied, Decisions
from precompute.reuse.kept_shard import PAIR, KeptShard
from precompute.reuse.shard_reuse import ShardReuse


@dataclass(frozen=True)
class User:
    """A user by hash: read (with or without an input), or kept; where the base has it, and whether it could stay."""

    hash_: int
    is_read: bool
    has_input: bool
    place: int
    could_stay: bool
    stays: bool


users = st.lists(
    st.builds(
        User, st.integers(0, 2**64 - 1), st.booleans(), st.booleans(), st.integers(-1, 500), st.booleans(),
        st.booleans(),
    ),
    max_size=60, unique_by=lambda user: user.hash_,
).map(lambda found: sorted(found, key=lambda user: user.hash_))  # fmt: skip


def copied_of(found: list[User]) -> Copied:
    """Copied of users, those that are read being all that is looked at."""
    read = [each for each in found if each.is_read]
    kept = [each for each in found if not each.is_read]
    asked = Decisions(
        rows=np.arange(len(read)),
        same=np.array([each.place for each in read], np.int64),
        could_stay=np.array([each.could_stay and each.place >= 0 for each in read], np.bool_),
        kept=np.array([max(0, each.place) for each in kept], np.int64),
        kept_hashes=np.array([each.hash_ for each in kept], np.uint64),
        pairs=np.empty(0, PAIR),
    )
    own = np.array([row for row, each in enumerate(read) if each.has_input], np.int64)
    return Copied.of(asked, np.array([each.hash_ for each in read], np.uint64), own)


def is_own(user: User) -> bool:
    return user.is_read and user.has_input


@given(users, st.integers(1, 20))
def test_pieces_are_a_naive_merge(found: list[User], most: int) -> None:
    there = [each for each in found if is_own(each) or not each.is_read]

    hashes, places, same, owners = [], [], [], 0
    for part, own in copied_of(found).parts(most):
        assert 1 <= len(part.hashes) <= most
        assert own.start == owners and own.stop - own.start == len(part.rows)
        owners = own.stop
        hashes += part.hashes.tolist()
        places += part.places.tolist()
        same += part.same.tolist()
        assert (part.places[part.rows] == -1).all()
        assert sorted([*part.rows.tolist(), *part.others.tolist()]) == list(range(len(part.hashes)))

    assert hashes == [each.hash_ for each in there]
    assert places == [-1 if is_own(each) else max(0, each.place) for each in there]
    assert same == [each.place for each in there if is_own(each)]


@given(users)
def test_who_stays_is_copied_and_everybody_has_a_reason(found: list[User]) -> None:
    copied = copied_of(found)
    own = [each for each in found if is_own(each)]
    stays = [each.stays and each.could_stay and each.place >= 0 for each in own]
    copied.stay(np.array(stays, np.bool_))

    reasons, places = {}, {}
    for each in found:
        if not each.is_read:
            reasons[each.hash_], places[each.hash_] = COPIED, max(0, each.place)
    for each, stay in zip(own, stays, strict=True):
        could = each.could_stay and each.place >= 0
        reasons[each.hash_] = (
            COPIED if stay else INPUTS if each.place < 0 else ENTERED if could else LOST
        )
        places[each.hash_] = each.place if stay else -1
    assert dict(zip(copied.hashes.tolist(), copied.reasons().tolist(), strict=True)) == reasons
    assert dict(zip(copied.hashes.tolist(), copied.places.tolist(), strict=True)) == places


@given(users, st.integers(0, 2**32 - 1))
def test_histories_are_put_together_in_hash_order(found: list[User], seed: int) -> None:
    rng, copied = np.random.default_rng(seed), copied_of(found)
    of_user = {each: rng.integers(0, 9, rng.integers(0, 4)) for each in copied.hashes.tolist()}
    own = Histories.of([of_user[each] for each in copied.hashes[copied.rows].tolist()])
    others = Histories.of([of_user[each] for each in copied.hashes[copied.others].tolist()])

    together = copied.together(own, others)

    whole = Histories.of(list(of_user.values()))
    assert together.indptr.tolist() == whole.indptr.tolist()
    assert together.indices.tolist() == whole.indices.tolist()


def test_a_user_of_a_shard_that_had_nobody_is_computed() -> None:
    # Given a base of few users, none of whom had a hash of this shard
    kept = KeptShard(np.empty(0, PAIR), np.empty(0, np.int64), {}, np.empty(0, np.bool_))
    reuse = ShardReuse(
        kept, None, {}, np.empty(0, np.bool_), np.empty((0, 2), np.float32), True, None
    )
    entities = ShardInput(
        pa.array(["ann"]), np.array([7], np.uint64), np.array([0, 1]), np.array([3]), {}
    )

    asked = reuse.ask(entities, np.array([9], np.uint64), range(1 << 64))

    assert asked.rows.tolist() == [0] and asked.same.tolist() == [-1]
    assert not asked.could_stay.any() and not len(asked.kept)
    assert asked.pairs.tolist() == [(7, 9)]


def test_every_user_of_the_base_with_the_same_input_is_copied_the_first_included() -> None:
    # Given a base of two users with records, and no item that could enter a list
    pairs = np.array([(3, 30), (7, 70)], PAIR)
    kept = KeptShard(pairs, np.array([0, 1]), {}, np.ones(2, np.bool_))
    reuse = ShardReuse(
        kept, None, {}, np.zeros(2, np.bool_), np.empty((0, 2), np.float32), True, None
    )

    # When both come with the inputs that they had, and a third is new
    entities = ShardInput(
        pa.array(["ann", "bob", "eve"]), np.array([3, 7, 9], np.uint64), np.array([0, 1, 2, 3]),
        np.array([3, 4, 5]), {},
    )  # fmt: skip
    asked = reuse.ask(entities, np.array([30, 70, 90], np.uint64), range(1 << 64))

    # Then only the third is computed
    assert asked.kept_hashes.tolist() == [3, 7] and asked.kept.tolist() == [0, 1]
    assert asked.rows.tolist() == [2] and asked.same.tolist() == [-1]
