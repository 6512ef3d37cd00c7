"""Users of a hash range, copied or computed: put together as a naive merge does it."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cache.model.tower import Histories
from precompute.partitions.shard_input import ShardInput
from precompute.reuse.base import BaseShard
from precompute.reuse.shard_reuse import ShardReuse
from precompute.scoring.copies import (
    COPIED_REASON,
    ENTERED_REASON,
    HASH_AND_DIGEST,
    INPUTS_REASON,
    ITEM_LOST_REASON,
    CopiedUsers,
    CopyDecisions,
)


@dataclass(frozen=True)
class User:
    """A user by hash: read (with or without an input), or kept; where the base has it, and whether it could stay."""

    hash_: int
    is_read: bool
    has_input: bool
    position: int
    could_stay: bool
    stays: bool


users = st.lists(
    st.builds(
        User, st.integers(0, 2**64 - 1), st.booleans(), st.booleans(), st.integers(-1, 500), st.booleans(),
        st.booleans(),
    ),
    max_size=60, unique_by=lambda user: user.hash_,
).map(lambda unsorted_users: sorted(unsorted_users, key=lambda user: user.hash_))  # fmt: skip


def copied_of(all_users: list[User]) -> CopiedUsers:
    """Copied of users, those that are read being all that is looked at."""
    read = [user for user in all_users if user.is_read]
    kept_users = [user for user in all_users if not user.is_read]
    decisions = CopyDecisions(
        checked_rows=np.arange(len(read)),
        unchanged_positions=np.array([user.position for user in read], np.int64),
        could_stay=np.array([user.could_stay and user.position >= 0 for user in read], np.bool_),
        copied_positions=np.array([max(0, user.position) for user in kept_users], np.int64),
        copied_hashes=np.array([user.hash_ for user in kept_users], np.uint64),
        digest_pairs=np.empty(0, HASH_AND_DIGEST),
    )
    own_rows = np.array([row for row, user in enumerate(read) if user.has_input], np.int64)
    return CopiedUsers.of(decisions, np.array([user.hash_ for user in read], np.uint64), own_rows)


def is_own(user: User) -> bool:
    return user.is_read and user.has_input


@given(users, st.integers(1, 20))
def test_pieces_are_a_naive_merge(found: list[User], most: int) -> None:
    present_users = [user for user in found if is_own(user) or not user.is_read]

    hashes, copied_records, unchanged_records, owners = [], [], [], 0
    for part, own_slice in copied_of(found).split(most):
        assert 1 <= len(part.user_hashes) <= most
        assert own_slice.start == owners and own_slice.stop - own_slice.start == len(part.own_rows)
        owners = own_slice.stop
        hashes += part.user_hashes.tolist()
        copied_records += part.copied_positions.tolist()
        unchanged_records += part.unchanged_positions.tolist()
        assert (part.copied_positions[part.own_rows] == -1).all()
        assert sorted([*part.own_rows.tolist(), *part.copied_rows.tolist()]) == list(range(len(part.user_hashes)))

    assert hashes == [user.hash_ for user in present_users]
    assert copied_records == [-1 if is_own(user) else max(0, user.position) for user in present_users]
    assert unchanged_records == [user.position for user in present_users if is_own(user)]


@given(users)
def test_who_stays_is_copied_and_everybody_has_a_reason(found: list[User]) -> None:
    copied = copied_of(found)
    own_users = [user for user in found if is_own(user)]
    stays = [user.stays and user.could_stay and user.position >= 0 for user in own_users]
    copied.stay(np.array(stays, np.bool_))

    reasons, record_by_hash = {}, {}
    for user in found:
        if not user.is_read:
            reasons[user.hash_], record_by_hash[user.hash_] = COPIED_REASON, max(0, user.position)
    for user, stay in zip(own_users, stays, strict=True):
        could = user.could_stay and user.position >= 0
        reasons[user.hash_] = (
            COPIED_REASON
            if stay
            else INPUTS_REASON
            if user.position < 0
            else ENTERED_REASON
            if could
            else ITEM_LOST_REASON
        )
        record_by_hash[user.hash_] = user.position if stay else -1
    assert dict(zip(copied.user_hashes.tolist(), copied.reason_numbers().tolist(), strict=True)) == reasons
    assert dict(zip(copied.user_hashes.tolist(), copied.copied_positions.tolist(), strict=True)) == record_by_hash


@given(users, st.integers(0, 2**32 - 1))
def test_histories_are_put_together_in_hash_order(found: list[User], seed: int) -> None:
    rng, copied = np.random.default_rng(seed), copied_of(found)
    of_user = {hash_value: rng.integers(0, 9, rng.integers(0, 4)) for hash_value in copied.user_hashes.tolist()}
    own_histories = Histories.of([of_user[hash_value] for hash_value in copied.user_hashes[copied.own_rows].tolist()])
    copied_histories = Histories.of(
        [of_user[hash_value] for hash_value in copied.user_hashes[copied.copied_rows].tolist()]
    )

    merged_histories = copied.merge_histories(own_histories, copied_histories)

    expected_histories = Histories.of(list(of_user.values()))
    assert merged_histories.indptr.tolist() == expected_histories.indptr.tolist()
    assert merged_histories.indices.tolist() == expected_histories.indices.tolist()


def test_a_user_of_a_shard_without_base_users_is_computed() -> None:
    # Given a base with few users, none of whom had a hash in this shard
    kept_shard = BaseShard(np.empty(0, HASH_AND_DIGEST), np.empty(0, np.int64), {}, np.empty(0, np.bool_))
    reuse = ShardReuse(kept_shard, None, {}, np.empty(0, np.bool_), np.empty((0, 2), np.float32), True, None)
    entities = ShardInput(pa.array(["ann"]), np.array([7], np.uint64), np.array([0, 1]), np.array([3]), {})

    decisions = reuse.decide(entities, np.array([9], np.uint64), range(1 << 64))

    assert decisions.checked_rows.tolist() == [0] and decisions.unchanged_positions.tolist() == [-1]
    assert not decisions.could_stay.any() and not len(decisions.copied_positions)
    assert decisions.digest_pairs.tolist() == [(7, 9)]


def test_every_user_of_the_base_with_the_same_input_is_copied_the_first_included() -> None:
    # Given a base of two users with records, and no item that could enter a list
    pairs = np.array([(3, 30), (7, 70)], HASH_AND_DIGEST)
    kept_shard = BaseShard(pairs, np.array([0, 1]), {}, np.ones(2, np.bool_))
    reuse = ShardReuse(kept_shard, None, {}, np.zeros(2, np.bool_), np.empty((0, 2), np.float32), True, None)

    # When both come with the same inputs as before, and a third user is new
    entities = ShardInput(
        pa.array(["ann", "bob", "eve"]), np.array([3, 7, 9], np.uint64), np.array([0, 1, 2, 3]),
        np.array([3, 4, 5]), {},
    )  # fmt: skip
    decisions = reuse.decide(entities, np.array([30, 70, 90], np.uint64), range(1 << 64))

    # Then only the third is computed
    assert decisions.copied_hashes.tolist() == [3, 7] and decisions.copied_positions.tolist() == [0, 1]
    assert decisions.checked_rows.tolist() == [2] and decisions.unchanged_positions.tolist() == [-1]
