"""Buckets of keys: whole shares, nobody has what another has, and no more keys move than shares change by."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cache.control.allotment import BUCKETS, Ranges, allotted, counts_of, size_of
from cache.control.key_split import Owners

KEYS = [f"key-{number}".encode() for number in range(20_000)]
NAMES = ("a", "b", "c", "d")


def owners_of(held: dict[str, Ranges]) -> dict[int, str]:
    """Owner by bucket; fails where one has two."""
    found: dict[int, str] = {}
    for name, ranges in held.items():
        for start, stop in ranges:
            for bucket in range(start, stop):
                assert bucket not in found
                found[bucket] = name
    return found


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 40))), min_size=1))
def test_a_change_of_shares_moves_only_as_many_buckets_as_shares_grow_by(
    steps: list[dict[str, int]],
) -> None:
    held: dict[str, Ranges] = {}
    for step in steps:
        shares = {name: number / 160 for name, number in step.items()}
        before, counts = owners_of(held), counts_of(shares)

        held = allotted(held, shares)

        after = owners_of(held)
        assert {name: size_of(ranges) for name, ranges in held.items()} == counts
        gained = Counter(name for bucket, name in after.items() if before.get(bucket) != name)
        had = Counter(before.values())
        assert gained == Counter({n: c - had[n] for n, c in counts.items() if c > had[n]})
        assert all(list(each) == sorted(each) for each in held.values())


@given(st.lists(st.integers(1, 100), min_size=2, max_size=8))
def test_shares_of_a_whole_are_all_buckets(weights: list[int]) -> None:
    shares = {str(at): weight / sum(weights) for at, weight in enumerate(weights)}

    counts = counts_of(shares)

    assert sum(counts.values()) == BUCKETS
    assert all(abs(counts[name] - share * BUCKETS) < 1 + 1e-6 for name, share in shares.items())


def test_keys_follow_their_buckets_and_two_salts_draw_apart() -> None:
    held = allotted({}, {"a": 0.25, "b": 0.5})

    found = Counter(Owners("salt", held).of(key) for key in KEYS)

    for name, share in (("a", 0.25), ("b", 0.5), (None, 0.25)):
        # Five standard deviations: one in two million such key sets would miss.
        bound = 5 * math.sqrt(len(KEYS) * share * (1 - share))
        assert abs(found[name] - share * len(KEYS)) < bound
    one, other = Owners("salt", held), Owners("another", held)
    both = sum(one.of(key) == other.of(key) == "b" for key in KEYS)
    assert abs(both - len(KEYS) / 4) < 5 * math.sqrt(len(KEYS) * 3 / 16)


def test_the_draw_is_fixed_for_it_must_agree_between_versions_of_the_service() -> None:
    held = allotted({}, {"a": 0.1, "b": 0.1})

    found = [Owners("default/ranker", held).of(key) for key in KEYS[:40]]

    assert held == {"a": ((0, 1000),), "b": ((1000, 2000),)}
    assert [at for at, name in enumerate(found) if name == "a"] == [8, 13, 16, 30, 36]
    assert [at for at, name in enumerate(found) if name == "b"] == [2, 7, 24, 28]
