"""Split of requests by a salted hash of the caller's key, by percent or by buckets that owners have. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import xxhash

BUCKETS = 10_000
"""Buckets that all keys are spread over: a share is a whole number of them, 0.01 % each."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges of buckets, each from its first to behind its last."""

_HASH_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Share of `percent` of all keys, drawn anew for every canary generation: no caller is always in the canary."""

    seed: int
    limit: int

    @classmethod
    def of(cls, salt: str, percent: float) -> "KeySplit":
        """The split of one salt; a canary's is the id of its generation."""
        return cls(split_seed(salt), round(_HASH_SPACE * (percent / 100.0)))

    def has_key(self, key: bytes) -> bool:
        """Returns whether the share has this key. A larger percentage keeps all it had."""
        return key_hash(key, self.seed) < self.limit


class Owners:
    """Owner of each of `BUCKETS` buckets of keys, or None where a bucket is nobody's."""

    __slots__ = ("_names", "_owners", "_seed")

    def __init__(self, salt: str, ranges_by_name: Mapping[str, Ranges]) -> None:
        self._seed = split_seed(salt)
        self._names = (None, *ranges_by_name)
        self._owners = bytearray(BUCKETS)
        for number, ranges in enumerate(ranges_by_name.values(), 1):
            for start, stop in ranges:
                self._owners[start:stop] = bytes([number]) * (stop - start)

    def of(self, key: bytes) -> str | None:
        """Name of whoever has the key's bucket."""
        return self._names[self._owners[key_hash(key, self._seed) * BUCKETS // _HASH_SPACE]]


def split_seed(salt: str) -> int:
    """Seed of a split: the 64-bit xxh3 (seed 0) of its salt."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def key_hash(key: bytes, seed: int) -> int:
    """The key's place among all keys, uniform in 0 to 2**64 - 1, for splits of this seed."""
    return xxhash.xxh3_64_intdigest(key, seed)


def bucket_count(ranges: Ranges) -> int:
    """Number of buckets."""
    return sum(stop - start for start, stop in ranges)


def whole_bucket_counts(fraction_by_name: Mapping[str, float]) -> dict[str, int]:
    """Whole buckets for shares of 1, summing to what the shares do: those rounded down most get the rest."""
    exact = {name: fraction * BUCKETS for name, fraction in fraction_by_name.items()}
    # Sums of floats: 0.1 * 3 is no whole number of buckets but for its last digits.
    count_by_name = {name: int(exact_count + 1e-6) for name, exact_count in exact.items()}
    remaining_count = round(sum(exact.values())) - sum(count_by_name.values())
    for name in sorted(exact, key=lambda name: count_by_name[name] - exact[name])[:remaining_count]:
        count_by_name[name] += 1
    return count_by_name


def allot_buckets(
    ranges_by_name: Mapping[str, Ranges], fraction_by_name: Mapping[str, float]
) -> dict[str, Ranges]:
    """Buckets of each name once its share is that of `fraction_by_name`, in their order; names it lacks give up all.

    Whoever shrinks gives up its last buckets; whoever grows takes of what is free then, the first ones: a bucket moves
    only where a share does. Raises ValueError when the shares are more than 1.
    """
    counts = whole_bucket_counts(fraction_by_name)
    if sum(counts.values()) > BUCKETS:
        raise ValueError(f"shares sum to {sum(fraction_by_name.values()):g}, more than 1")
    buckets_by_name = {
        name: _buckets_of(ranges_by_name.get(name, ()))[:count] for name, count in counts.items()
    }
    used_buckets = {bucket for buckets in buckets_by_name.values() for bucket in buckets}
    free = (bucket for bucket in range(BUCKETS) if bucket not in used_buckets)
    for name, count in counts.items():
        buckets_by_name[name] += [next(free) for _ in range(count - len(buckets_by_name[name]))]
    return {name: _ranges_of(sorted(buckets)) for name, buckets in buckets_by_name.items()}


def _buckets_of(ranges: Ranges) -> list[int]:
    return [bucket for start, stop in ranges for bucket in range(start, stop)]


def _ranges_of(buckets: Iterable[int]) -> Ranges:
    runs = groupby(enumerate(buckets), lambda placed: placed[1] - placed[0])
    ranges = []
    for _, run in runs:
        run_buckets = [bucket for _, bucket in run]
        ranges.append((run_buckets[0], run_buckets[-1] + 1))
    return tuple(ranges)
