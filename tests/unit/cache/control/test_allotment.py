"""Buckets of keys: whole shares, nobody has what another has, and no more keys move than shares change by."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cache.traffic.split import (
    BUCKET_COUNT,
    BucketOwners,
    BucketRanges,
    allot_buckets,
    bucket_count,
    whole_bucket_counts,
)

KEYS = [f"key-{number}".encode() for number in range(20_000)]
NAMES = ("a", "b", "c", "d")


def owners_of(ranges_by_name: dict[str, BucketRanges]) -> dict[int, str]:
    """Owner by bucket; fails where one has two."""
    owner_by_bucket: dict[int, str] = {}
    for name, ranges in ranges_by_name.items():
        for start, stop in ranges:
            for bucket in range(start, stop):
                assert bucket not in owner_by_bucket
                owner_by_bucket[bucket] = name
    return owner_by_bucket


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 40))), min_size=1))
def test_a_change_of_shares_moves_only_as_many_buckets_as_shares_grow_by(steps: list[dict[str, int]]) -> None:
    ranges_by_name: dict[str, BucketRanges] = {}
    for step in steps:
        fraction_by_name = {name: number / 160 for name, number in step.items()}
        previous_owner_by_bucket, counts = (owners_of(ranges_by_name), whole_bucket_counts(fraction_by_name))

        ranges_by_name = allot_buckets(ranges_by_name, fraction_by_name)

        after = owners_of(ranges_by_name)
        assert {name: bucket_count(ranges) for name, ranges in ranges_by_name.items()} == counts
        gained = Counter(name for bucket, name in after.items() if previous_owner_by_bucket.get(bucket) != name)
        previous_count_by_name = Counter(previous_owner_by_bucket.values())
        assert gained == Counter(
            {n: c - previous_count_by_name[n] for n, c in counts.items() if c > previous_count_by_name[n]}
        )
        assert all(list(ranges) == sorted(ranges) for ranges in ranges_by_name.values())


@given(st.lists(st.integers(1, 100), min_size=2, max_size=8))
def test_shares_of_a_whole_are_all_buckets(weights: list[int]) -> None:
    fraction_by_name = {str(at): weight / sum(weights) for at, weight in enumerate(weights)}

    counts = whole_bucket_counts(fraction_by_name)

    assert sum(counts.values()) == BUCKET_COUNT
    assert all(abs(counts[name] - fraction * BUCKET_COUNT) < 1 + 1e-6 for name, fraction in fraction_by_name.items())


def test_keys_follow_their_buckets_and_two_salts_draw_apart() -> None:
    ranges_by_name = allot_buckets({}, {"a": 0.25, "b": 0.5})

    key_count_by_owner = Counter(BucketOwners("salt", ranges_by_name).owner_of(key) for key in KEYS)

    for name, fraction in (("a", 0.25), ("b", 0.5), (None, 0.25)):
        # Five standard deviations: one in two million such key sets would miss.
        bound = 5 * math.sqrt(len(KEYS) * fraction * (1 - fraction))
        assert abs(key_count_by_owner[name] - fraction * len(KEYS)) < bound
    owners, resalted_owners = (BucketOwners("salt", ranges_by_name), BucketOwners("another", ranges_by_name))
    common_key_count = sum(owners.owner_of(key) == resalted_owners.owner_of(key) == "b" for key in KEYS)
    assert abs(common_key_count - len(KEYS) / 4) < 5 * math.sqrt(len(KEYS) * 3 / 16)


def test_the_draw_is_fixed_for_it_must_agree_between_versions_of_the_service() -> None:
    ranges_by_name = allot_buckets({}, {"a": 0.1, "b": 0.1})

    key_owners = [BucketOwners("default/ranker", ranges_by_name).owner_of(key) for key in KEYS[:40]]

    assert ranges_by_name == {"a": ((0, 1000),), "b": ((1000, 2000),)}
    assert [at for at, name in enumerate(key_owners) if name == "a"] == [8, 13, 16, 30, 36]
    assert [at for at, name in enumerate(key_owners) if name == "b"] == [2, 7, 24, 28]
