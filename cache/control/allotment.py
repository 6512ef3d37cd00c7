"""Allotment of buckets of keys: who has which, and how shares change with the fewest keys moved. Pure."""

from collections.abc import Iterable, Mapping
from itertools import groupby

BUCKETS = 10_000
"""Buckets that all keys are spread over: a share is a whole number of them, 0.01 % each."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges of buckets, each from its first to behind its last."""


def size_of(ranges: Ranges) -> int:
    """Number of buckets."""
    return sum(stop - start for start, stop in ranges)


def counts_of(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole buckets for shares of 1, summing to what the shares do: those rounded down most get the rest."""
    exact = {name: share * BUCKETS for name, share in shares.items()}
    # Sums of floats: 0.1 * 3 is no whole number of buckets but for its last digits.
    found = {name: int(each + 1e-6) for name, each in exact.items()}
    rest = round(sum(exact.values())) - sum(found.values())
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[:rest]:
        found[name] += 1
    return found


def allotted(held: Mapping[str, Ranges], shares: Mapping[str, float]) -> dict[str, Ranges]:
    """Buckets of each name once its share is that of `shares`, in their order; who is not named there gives up all.

    Whoever shrinks gives up its last buckets; whoever grows takes of what is free then, the first ones: a bucket moves
    only where a share does. Raises ValueError when the shares are more than 1.
    """
    counts = counts_of(shares)
    if sum(counts.values()) > BUCKETS:
        raise ValueError(f"shares sum to {sum(shares.values()):g}, more than 1")
    kept = {name: _buckets(held.get(name, ()))[:count] for name, count in counts.items()}
    taken = {each for buckets in kept.values() for each in buckets}
    free = (each for each in range(BUCKETS) if each not in taken)
    for name, count in counts.items():
        kept[name] += [next(free) for _ in range(count - len(kept[name]))]
    return {name: _ranges(sorted(buckets)) for name, buckets in kept.items()}


def _buckets(ranges: Ranges) -> list[int]:
    return [each for start, stop in ranges for each in range(start, stop)]


def _ranges(buckets: Iterable[int]) -> Ranges:
    runs = groupby(enumerate(buckets), lambda placed: placed[1] - placed[0])
    found = []
    for _, run in runs:
        each = [bucket for _, bucket in run]
        found.append((each[0], each[-1] + 1))
    return tuple(found)
