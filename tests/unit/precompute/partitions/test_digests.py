"""Digests of inputs: whatever changes about a user changes the digest, however Arrow lays it out nothing else does."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from precompute.partitions.digests import Digests, digest_column, digest_columns, digest_users, digest_value_rows
from precompute.partitions.shard_input import ShardInput

HASHES: Digests = np.random.default_rng(0).integers(0, 2**64, 40, np.uint64)
KINDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), st.text(max_size=4)),
    "large text": (pa.large_string(), st.text(max_size=4)),
    "whole": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.int8(), st.integers(-128, 127)),
    "unsigned": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "half": (pa.float16(), st.floats(width=16, allow_nan=False).map(np.float16)),
    "truth": (pa.bool_(), st.booleans()),
    "time": (pa.timestamp("us", "UTC"), st.integers(0, 2**40).map(
        lambda microseconds: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    )),
    "texts": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=2), max_size=3)),
    "vector": (pa.list_(pa.float32()), st.lists(st.floats(width=32, allow_nan=False), max_size=3)),
    "large vector": (pa.large_list(pa.float32()), st.lists(st.floats(width=32, allow_nan=False), max_size=3)),
    "fixed": (pa.list_(pa.float32(), 2), st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2)),
    "coded": (pa.dictionary(pa.int32(), pa.string()), st.text(max_size=4)),
}  # fmt: skip


def columns(kind: str) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | KINDS[kind][1], max_size=12)


def bits(value: Any) -> Any:
    """A value as an input sees it: 0.0 and -0.0 are two."""
    if isinstance(value, list):
        return tuple(map(bits, value))
    return (str(value), value) if isinstance(value, float | np.floating) else value


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_have_one_digest_where_they_hold_the_same(kind: str, data: st.DataObject) -> None:
    values = data.draw(columns(kind))

    digests = digest_column(pa.array(values, KINDS[kind][0])).tolist()

    for row, digest in enumerate(digests):
        for earlier_row in range(row):
            assert (digest == digests[earlier_row]) == (bits(values[row]) == bits(values[earlier_row]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_chunks_and_slices_change_nothing(kind: str, data: st.DataObject) -> None:
    values = data.draw(columns(kind))
    full_array = pa.array(values, KINDS[kind][0])
    cuts = sorted([0, *data.draw(st.lists(st.integers(0, len(values)), max_size=3)), len(values)])

    chunks = [full_array.slice(start, end - start) for start, end in pairwise(cuts)]
    copies = [pa.concat_arrays([chunk]) for chunk in chunks]

    expected = digest_column(full_array).tolist()
    for chunk_list in (chunks, copies):
        assert digest_column(pa.chunked_array(chunk_list, full_array.type)).tolist() == expected
        assert [digest for chunk in chunk_list for digest in digest_column(chunk).tolist()] == expected


@pytest.mark.parametrize(
    ("first_kind", "second_kind"),
    [
        ("text", "large text"), ("text", "coded"), ("small", "whole"), ("vector", "large vector"),
        ("fixed", "vector"), ("float", "double"),
    ],
)  # fmt: skip
@settings(max_examples=25)
@given(data=st.data())
def test_how_a_value_is_laid_out_does_not_matter(first_kind: str, second_kind: str, data: st.DataObject) -> None:
    values = data.draw(columns(first_kind))

    first_digests, second_digests = (
        digest_column(pa.array(values, KINDS[kind][0])) for kind in (first_kind, second_kind)
    )

    assert first_digests.tolist() == second_digests.tolist()


def test_a_value_under_a_null_is_not_looked_at() -> None:
    numbers = pa.array([1.0, 2.0, 3.0, 4.0], pa.float32())
    mask = pa.array([False, True])
    fixed = pa.FixedSizeListArray.from_arrays(numbers, 2, mask=mask)
    ragged = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), numbers, mask=mask)
    expected = digest_column(pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))).tolist()

    assert digest_column(fixed).tolist() == digest_column(ragged).tolist() == expected


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=4), max_size=8))
def test_rows_of_numbers_have_their_own_bounds(rows: list[list[int]]) -> None:
    values = np.array([number for row in rows for number in row], np.uint64)
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)

    digests = digest_value_rows(values, starts).tolist()

    for row, digest in enumerate(digests):
        assert digest_value_rows(np.array(rows[row], np.uint64), np.array([0, len(rows[row])])) == [digest]
        for earlier_row in range(row):
            assert (digest == digests[earlier_row]) == (rows[row] == rows[earlier_row])


def test_columns_count_by_their_names_and_in_any_order() -> None:
    ages, sizes = pa.array([1, 2]), pa.array([2, 1])

    digests = digest_columns({"age": ages, "size": sizes}, 2).tolist()

    assert digest_columns({"size": sizes, "age": ages}, 2).tolist() == digests
    assert digest_columns({"age": sizes, "size": ages}, 2).tolist() == digests[::-1]
    assert digests[0] != digests[1]
    assert digest_columns({}, 2).tolist() == [0, 0]


Parts = dict[str, Any]


def entities(users: list[Parts]) -> ShardInput:
    features = {
        "country": pa.array([user["country"] for user in users], pa.int64()),
        "tags": pa.array([user["tags"] for user in users], pa.list_(pa.string())),
    }
    vectors = np.array([user["vector"] for user in users], np.float32).reshape(-1, 2)
    return ShardInput(
        entity_ids=pa.array([str(row) for row in range(len(users))], pa.string()),
        entity_hashes=np.arange(len(users), dtype=np.uint64),
        history_indptr=np.cumsum([0, *(len(user["history"]) for user in users)]),
        history_ordinals=np.array([item for user in users for item in user["history"]], np.int64),
        features=features,
        entity_vectors=vectors,
    )


parts = st.fixed_dictionaries(
    {
        "history": st.lists(st.integers(0, 39), max_size=6, unique=True),
        "country": st.none() | st.integers(0, 3),
        "tags": st.none() | st.lists(st.sampled_from(["a", "b", "ab"]), max_size=3),
        "vector": st.just([float("nan")] * 2) | st.tuples(*[st.floats(-2, 2, width=32)] * 2).map(list),
    }
)
CHANGES: dict[str, Callable[[Parts], Parts]] = {
    "order": lambda user: {"history": user["history"][::-1]},
    "another item": lambda user: {"history": [39 - item for item in user["history"]]},
    "more": lambda user: {"history": [*user["history"], 41 - len(user["history"])]},
    "less": lambda user: {"history": user["history"][1:]},
    "newest gone": lambda user: {"history": user["history"][:-1]},
    "country": lambda user: {"country": 7},
    "no country": lambda user: {"country": None},
    "no tags": lambda user: {"tags": None},
    "tags without any": lambda user: {"tags": []},
    "tags joined": lambda user: {"tags": ["".join(user["tags"] or [])]},
    "vector": lambda user: {"vector": [user["vector"][1], user["vector"][0]]},
    "no vector": lambda user: {"vector": [float("nan")] * 2},
}


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=25)
@given(users=st.lists(parts, min_size=1, max_size=5), data=st.data())
def test_a_digest_changes_with_its_user_and_with_nobody_else(
    change: str, users: list[Parts], data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(users) - 1))
    changed_users = [dict(user) for user in users]
    changed_users[row] |= CHANGES[change](users[row])
    assume(max(changed_users[row]["history"], default=0) < 40)
    assume(len(set(changed_users[row]["history"])) == len(changed_users[row]["history"]))
    assume(repr(changed_users[row]) != repr(users[row]))

    original_digests, after = (
        digest_users(entities(user_list), HASHES).tolist() for user_list in (users, changed_users)
    )

    assert [row for row, digest in enumerate(after) if digest != original_digests[row]] == [row]


@given(users=st.lists(parts, min_size=2, max_size=5))
def test_an_item_that_goes_to_the_next_user_changes_both(users: list[Parts]) -> None:
    assume(users[0]["history"] and users[0]["history"][-1] not in users[1]["history"])
    changed_users = [dict(user) for user in users]
    changed_users[0]["history"] = users[0]["history"][:-1]
    changed_users[1]["history"] = [users[0]["history"][-1], *users[1]["history"]]

    original_digests, after = (
        digest_users(entities(user_list), HASHES).tolist() for user_list in (users, changed_users)
    )

    assert [row for row, digest in enumerate(after) if digest != original_digests[row]] == [0, 1]


@given(users=st.lists(parts, min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_numbers_of_items_and_the_company_do_not_matter(users: list[Parts], seed: int) -> None:
    rng = np.random.default_rng(seed)
    turned = rng.permutation(40)
    order = rng.permutation(len(users))
    all_entities = entities(users)
    expected = digest_users(all_entities, HASHES)[order].tolist()

    moved = replace(all_entities, history_ordinals=turned[all_entities.history_ordinals]).select_rows(order)

    hashes = np.empty_like(HASHES)
    hashes[turned] = HASHES
    assert digest_users(moved, hashes).tolist() == expected
