"""Values that events set, put into the columns that filters read: 1,000 of a million items (quick: 100,000) at once.

- `number_vs_filter`, `flag_vs_filter`, `text_vs_filter`, `own_text_vs_filter`, `texts_vs_filter`: times per second that
  the values of one attribute are put in, over times per second that one filter is worked out over as many items. Texts
  are of 5,000 names, half of the values new ones; an own text is another one of each item; lists have three texts.

Figures: milliseconds of each, and of taking in one event, microseconds.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cache.events.event import Event
from cache.events.newer_events import AttributeEvents
from cache.filters.attributes import AttributeColumn, ItemAttributes, ItemValue, TextDictionary
from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering, mask_of
from cache.format.stream_position import Position
from tests.bench.tools.harness import Options, Report, alternate, parse

ITEMS, QUICK_ITEMS, VALUES, NAMES, TAGS, EVENTS = 1_000_000, 100_000, 1_000, 5_000, 200, 20_000


def names(count: int) -> TextDictionary:
    """Texts of a column, in order."""
    raws = [f"name-{number:07d}".encode() for number in range(count)]
    ends = np.cumsum([0, *map(len, raws)]).astype(np.uint64)
    return TextDictionary(np.frombuffer(b"".join(raws), np.uint8), ends)


def filtering(items: int) -> Filtering:
    """Drawn attributes of that many items."""
    rng = np.random.default_rng(0)
    tags = rng.integers(0, TAGS, 3 * items).astype(np.uint32)
    ends = np.arange(0, 3 * items + 1, 3).astype(np.uint64)
    columns = {
        "number": AttributeColumn("number", 100 * rng.random(items)),
        "flag": AttributeColumn("flag", rng.integers(0, 2, items).astype(np.uint8)),
        "text": AttributeColumn("text", rng.integers(0, NAMES, items).astype(np.uint32), None, names(NAMES)),
        "own_text": AttributeColumn("text", rng.permutation(items).astype(np.uint32), None, names(items)),
        "texts": AttributeColumn("texts", tags, ends, names(TAGS)),
    }  # fmt: skip
    return Filtering(ItemAttributes(items, columns), np.zeros((items, 2), np.float32))


VALUE: dict[str, Callable[[int], Any]] = {
    "number": lambda number: number / 7,
    "flag": lambda number: number % 3 == 0,
    "text": lambda number: f"name-{number:07d}" if number % 2 else f"new-{number}",
    "own_text": lambda number: f"title {number}",
    "texts": lambda number: ["name-0000001", f"new-{number % 10}"],
}


def measure(report: Report, options: Options) -> None:
    """In this process, on one thread."""
    items = QUICK_ITEMS if options.quick else ITEMS
    base_filtering, rng = filtering(items), np.random.default_rng(1)
    filter_ = read_filter({"<": ["number", 20]}).root_expression
    times: dict[str, list[float]] = {name: [] for name in ("filter", *VALUE)}

    def timed(name: str, work: Callable[[], object]) -> float:
        started = perf_counter()
        work()
        times[name].append(1e3 * (perf_counter() - started))
        return 1e3 / times[name][-1]

    def put_in(name: str) -> float:
        ordinals = rng.choice(items, VALUES, replace=False).tolist()
        values = [ItemValue(ordinal, name, VALUE[name](number)) for number, ordinal in enumerate(ordinals)]
        return timed(name, lambda: base_filtering.with_item_values(values))

    def worked_out() -> float:
        return timed("filter", lambda: mask_of(filter_, base_filtering.attributes))

    ratio_by_name = alternate(
        worked_out,
        {name: (lambda name=name: put_in(name)) for name in VALUE},  # type: ignore[misc]
        rounds=max(11, options.rounds),
    )
    for name, ratio in ratio_by_name.items():
        report.ratios[f"{name}_vs_filter"] = ratio
    for name, durations_ms in times.items():
        report.figures[f"{name}: milliseconds"] = round(median(durations_ms), 2)
    report.figures["items"], report.figures["values at once"] = items, VALUES
    events, attribute_events = [
        Event("e", 0, None, b"item-%d" % number, attributes={"price": 1.5, "stock": True})
        for number in range(EVENTS)
    ], AttributeEvents()  # fmt: skip
    started = perf_counter()
    for number, event in enumerate(events, 1):
        attribute_events.add(Position(number, 0), event)
    report.figures["taking in an event: microseconds"] = round(1e6 * (perf_counter() - started) / EVENTS, 2)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("changed_columns", ("numpy",))
    measure(report, options)
    report.show(options)


if __name__ == "__main__":
    main()
