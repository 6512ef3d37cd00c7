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


def counts_of(fraction_by_name: Mapping[str, float]) -> dict[str, int]:
    """Whole buckets for shares of 1, summing to what the shares do: those rounded down most get the rest."""
    exact = {name: fraction * BUCKETS for name, fraction in fraction_by_name.items()}
    # Sums of floats: 0.1 * 3 is no whole number of buckets but for its last digits.
    count_by_name = {name: int(exact_count + 1e-6) for name, exact_count in exact.items()}
    remaining_count = round(sum(exact.values())) - sum(count_by_name.values())
    for name in sorted(exact, key=lambda name: count_by_name[name] - exact[name])[:remaining_count]:
        count_by_name[name] += 1
    return count_by_name


def allotted(
    ranges_by_name: Mapping[str, Ranges], fraction_by_name: Mapping[str, float]
) -> dict[str, Ranges]:
    """Buckets of each name once its share is that of `fraction_by_name`, in their order; names it lacks give up all.

    Whoever shrinks gives up its last buckets; whoever grows takes of what is free then, the first ones: a bucket moves
    only where a share does. Raises ValueError when the shares are more than 1.
    """
    counts = counts_of(fraction_by_name)
    if sum(counts.values()) > BUCKETS:
        raise ValueError(f"shares sum to {sum(fraction_by_name.values()):g}, more than 1")
    buckets_by_name = {
        name: _buckets(ranges_by_name.get(name, ()))[:count] for name, count in counts.items()
    }
    used_buckets = {bucket for buckets in buckets_by_name.values() for bucket in buckets}
    free = (bucket for bucket in range(BUCKETS) if bucket not in used_buckets)
    for name, count in counts.items():
        buckets_by_name[name] += [next(free) for _ in range(count - len(buckets_by_name[name]))]
    return {name: _ranges(sorted(buckets)) for name, buckets in buckets_by_name.items()}


def _buckets(ranges: Ranges) -> list[int]:
    return [bucket for start, stop in ranges for bucket in range(start, stop)]


def _ranges(buckets: Iterable[int]) -> Ranges:
    runs = groupby(enumerate(buckets), lambda placed: placed[1] - placed[0])
    ranges = []
    for _, run in runs:
        run_buckets = [bucket for _, bucket in run]
        ranges.append((run_buckets[0], run_buckets[-1] + 1))
    return tuple(ranges)
