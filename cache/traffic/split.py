"""Split of requests by a salted hash of the caller's key: by percentage, or by ranges of buckets per owner. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import xxhash

BUCKET_COUNT = 10_000
"""Number of buckets over which all keys are spread; a share is a whole number of buckets of 0.01 % each."""

BucketRanges = tuple[tuple[int, int], ...]
"""Ascending ranges of buckets as (first, one past the last)."""

_HASH_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Share of `percent` of all keys, which differs between canary generations: no caller is always in the canary."""

    hash_seed: int
    key_hash_limit: int

    @classmethod
    def of(cls, salt: str, key_percent: float) -> "KeySplit":
        """Build from a salt; a canary's salt is its generation id."""
        return cls(split_seed(salt), round(_HASH_SPACE * (key_percent / 100.0)))

    def has_key(self, key: bytes) -> bool:
        """Return whether the key is in the share. A larger percentage keeps all keys of a smaller one."""
        return key_hash(key, self.hash_seed) < self.key_hash_limit


class BucketOwners:
    """Owners of the `BUCKET_COUNT` buckets of keys; None for a bucket without an owner."""

    __slots__ = ("_names", "_owners", "_seed")

    def __init__(self, salt: str, ranges_by_name: Mapping[str, BucketRanges]) -> None:
        self._seed = split_seed(salt)
        self._names = (None, *ranges_by_name)
        self._owners = bytearray(BUCKET_COUNT)
        for owner_number, ranges in enumerate(ranges_by_name.values(), 1):
            for start, stop in ranges:
                self._owners[start:stop] = bytes([owner_number]) * (stop - start)

    def owner_of(self, key: bytes) -> str | None:
        """Return the name of the owner of the key's bucket; None without an owner."""
        return self._names[self._owners[key_hash(key, self._seed) * BUCKET_COUNT // _HASH_SPACE]]


def split_seed(salt: str) -> int:
    """Return the seed of a split: the 64-bit xxh3 (seed 0) of its salt."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def key_hash(key: bytes, hash_seed: int) -> int:
    """Return the key's hash for splits of this seed, uniform in 0 to 2**64 - 1."""
    return xxhash.xxh3_64_intdigest(key, hash_seed)


def bucket_count(ranges: BucketRanges) -> int:
    """Return the number of buckets in the ranges."""
    return sum(stop - start for start, stop in ranges)


def whole_bucket_counts(fraction_by_name: Mapping[str, float]) -> dict[str, int]:
    """Convert fractions to whole numbers of buckets with the same sum, by the largest remainders."""
    exact_count_by_name = {name: fraction * BUCKET_COUNT for name, fraction in fraction_by_name.items()}
    # 1e-6 compensates for floating-point errors: 0.1 * 3 is not exactly a whole number of buckets.
    count_by_name = {name: int(exact_count + 1e-6) for name, exact_count in exact_count_by_name.items()}
    remaining_count = round(sum(exact_count_by_name.values())) - sum(count_by_name.values())
    for name in sorted(exact_count_by_name, key=lambda name: count_by_name[name] - exact_count_by_name[name])[
        :remaining_count
    ]:
        count_by_name[name] += 1
    return count_by_name


def allot_buckets(
    ranges_by_name: Mapping[str, BucketRanges], fraction_by_name: Mapping[str, float]
) -> dict[str, BucketRanges]:
    """Return each name's buckets for its new share, in the order of `fraction_by_name`.

    Owners that are not named lose theirs. A shrinking owner gives up its last buckets; a growing one takes the first
    free ones: buckets move only if a share changes. Raises ValueError if the shares sum to more than 1.
    """
    count_by_name = whole_bucket_counts(fraction_by_name)
    if sum(count_by_name.values()) > BUCKET_COUNT:
        raise ValueError(f"shares sum to {sum(fraction_by_name.values()):g}, more than 1")
    buckets_by_name = {name: _buckets_of(ranges_by_name.get(name, ()))[:count] for name, count in count_by_name.items()}
    used_buckets = {bucket for buckets in buckets_by_name.values() for bucket in buckets}
    free_buckets = (bucket for bucket in range(BUCKET_COUNT) if bucket not in used_buckets)
    for name, count in count_by_name.items():
        buckets_by_name[name] += [next(free_buckets) for _ in range(count - len(buckets_by_name[name]))]
    return {name: _ranges_of(sorted(buckets)) for name, buckets in buckets_by_name.items()}


def _buckets_of(ranges: BucketRanges) -> list[int]:
    return [bucket for start, stop in ranges for bucket in range(start, stop)]


def _ranges_of(buckets: Iterable[int]) -> BucketRanges:
    runs = groupby(enumerate(buckets), lambda placed: placed[1] - placed[0])
    ranges = []
    for _, run in runs:
        run_buckets = [bucket for _, bucket in run]
        ranges.append((run_buckets[0], run_buckets[-1] + 1))
    return tuple(ranges)
