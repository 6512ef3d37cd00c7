"""Changes of a month: what changes in the inputs before a night, and what the night must report about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.manifest import EntityKind
from precompute.builds.reports import BEGIN_REPORT
from precompute.config.settings import TableConfig
from precompute.filters.item_attributes import ATTRIBUTES_FOLDER
from precompute.partitions.digests import item_digests_path
from precompute.reference.train import train_reference
from precompute.reuse.base import OTHER_BUNDLE_REASON, OTHER_SETTINGS_REASON
from precompute.reuse.inputs import BACK_REASON, ERASED_REASON, FILES_REASON, LATE_REASON, TABLES_REASON
from precompute.reuse.prior import DAMAGED_REASON
from precompute.scoring.copies import ENTERED_REASON, INPUTS_REASON, ITEM_LOST_REASON, REASON_NAMES, inputs_path
from tests.integration import nights
from tests.integration.changed.month import Month, spoil
from tests.integration.feature_towers import (
    COUNTRIES,
    SCENTS,
    from_history_and_country,
    from_mood,
    from_scent,
    vectors_column,
    with_towers,
)

AVID: Final = "somebody-avid"
NAMED: Final = "item-that-was-named-before"


@dataclass(frozen=True, slots=True)
class Event:
    """Change before a night; `reads` is why all source files are read, `why` is why no list is copied.

    `computed` are reasons, for one of which some users are computed; where it `copies` nothing, nobody is copied.
    """

    happen: Callable[[Month], None]
    reads: str = ""
    no_copy_reason: str = ""
    computed: tuple[int, ...] = ()
    copies: bool = True


def change_nothing(month: Month) -> None:
    """Add no file."""


def avid_day(month: Month) -> None:
    """One user clicks on more items than a night takes, and there are a few odd rows."""
    items = [str(item_id) for item_id in month.rng.permutation(month.ids("item"))[:60]]
    users: list[str | None] = [AVID] * len(items)
    file = month.file(month.night).with_name(f"day-{month.night:03d}-avid.parquet")
    month.clicks([*users, None, "x" * 300], [*items, *items[:2]], file=file)


def late_rows(month: Month) -> None:
    """Some clicks have times of the next day."""
    users, items = month.ids("user")[:3], month.ids("item")[:3]
    file = month.file(month.night).with_name(f"day-{month.night:03d}-late.parquet")
    month.clicks(users, items, at=[month.cut + timedelta(hours=1)] * 3, file=file)


def in_between(month: Month) -> None:
    """A file arrives whose name sorts before files that were read."""
    users, items = month.ids("user")[3:6], month.ids("item")[3:6]
    month.clicks(users, items, file=month.file(0).with_name("day-000-more.parquet"))


def rewritten(month: Month) -> None:
    """Histories are shorter than before, one user is gone for good, and another has more."""
    table = pq.read_table(month.file(0))
    users = table["user"].to_pylist()
    rarest_user = min(sorted(set(users)), key=users.count)
    table = table.filter(pa.array([user_id != rarest_user for user_id in users]))
    is_kept = month.rng.random(len(table)) > 0.02
    pq.write_table(table.filter(pa.array(is_kept)), month.file(0))


def items_gone(month: Month) -> None:
    """Two items leave the catalogue."""
    month.lose_items(2)


def items_back(month: Month) -> None:
    """Items that left, and that interactions name, return."""
    month.bring_items_back(2)


def erased(kind: EntityKind) -> Callable[[Month], None]:
    """A user or an item is erased."""
    return lambda month: month.erase(str(month.rng.choice(month.ids(kind))), kind)


def other_column(
    name: str, column: str, fraction: float, values: Callable[[Month, int], Sequence[Any]]
) -> Callable[[Month], None]:
    """At least one row, or a share of a table's rows, has another value in a column."""

    def happen(month: Month) -> None:
        path = month.config.path(name)
        table = pq.read_table(path)
        count = max(1, int(fraction * len(table)))
        rows = month.rng.choice(len(table), count, replace=False)
        column_values = table[column].to_pylist()
        for row, value in zip(rows.tolist(), values(month, count), strict=True):
            column_values[row] = value
        changed_column = pa.array(column_values, table.schema.field(column).type)
        at = table.column_names.index(column)
        pq.write_table(table.set_column(at, column, changed_column), path)

    return happen


def drawn_vectors(width: int) -> Callable[[Month, int], Sequence[Any]]:
    """Return new vectors; if there are several, every third is missing."""
    return lambda month, count: [
        None if row % 3 == 2 else month.rng.standard_normal(width).astype("f4").tolist() for row in range(count)
    ]


def whole_vectors(month: Month, count: int) -> Sequence[Any]:
    """Return new item vectors that are longer than most, so that some lists include them."""
    item_vectors = 3 * month.rng.standard_normal((count, 16)).astype("f4")
    return [vector.tolist() for vector in item_vectors]


def stock(month: Month, count: int) -> Sequence[Any]:
    """Return whether items are in stock, which half of them are."""
    return [bool(is_in_stock) for is_in_stock in month.rng.random(count) < 0.5]


def countries(month: Month, count: int) -> Sequence[Any]:
    """Return the countries that users moved to or stayed in."""
    country_numbers: list[int] = month.rng.integers(COUNTRIES, size=count).tolist()
    return country_numbers


def new_items(count: int) -> Callable[[Month], None]:
    """Items arrive that no row named before."""
    return lambda month: add_items(month, [f"new-item-{month.night}-{number}" for number in range(count)])


def add_items(month: Month, ids: Sequence[str]) -> None:
    """Add items to the catalogue."""
    path = month.config.path("items.parquet")
    table = pq.read_table(path)
    looks_vectors = vectors_column(len(ids), month.night).to_pylist()
    more: Mapping[str, Any] = {
        "item": ids,
        "looks": [[3 * number for number in vector] for vector in looks_vectors],  # long, so wanted by some
        "scent": vectors_column(len(ids), month.night, SCENTS),
    }
    rows = pa.table({name: more[name] for name in table.column_names}, schema=table.schema)
    pq.write_table(pa.concat_tables([table, rows]), path)


def named_before_it_is_there(month: Month) -> None:
    """A row names an item that is not in the catalogue yet."""
    file = month.file(month.night).with_name(f"day-{month.night:03d}-named.parquet")
    month.clicks(month.ids("user")[:4], [NAMED] * 4, file=file)


def rolled_back(month: Month) -> None:
    """The previous generation is live again: the newest one stays the base."""
    nights.roll_back(month.config)


def retrained(month: Month) -> None:
    """Train another reference bundle from all rows so far."""
    train_reference(month.config, data_until=month.cut.isoformat())


def other_user_tower(month: Month) -> None:
    """Use another bundle with the same item tower."""
    with_towers(
        month.config,
        lambda items: from_history_and_country(items, seed=month.night),
        {"mood": from_mood(), "worth": from_scent()},
    )


def other_values(month: Month) -> None:
    """Use another bundle with the same towers."""
    with_towers(
        month.config, from_history_and_country, {"mood": from_mood(times=1.0 + month.night), "worth": from_scent()}
    )


def shorter_histories(month: Month) -> None:
    """Use another bundle of the same files whose user tower takes fewer items."""
    with_towers(
        month.config,
        lambda items: from_history_and_country(items, max_length=2),
        {"mood": from_mood(), "worth": from_scent()},
    )


def other_k(month: Month) -> None:
    """Compute lists that are one item longer."""
    tables = month.config.tables
    longer = TableConfig("user_topk", k=tables["user_topk"].k + 1)
    month.configure(tables={**tables, "user_topk": longer})


def damaged(*names: str) -> Callable[[Month], None]:
    """Flip bits in files of the base on disk."""

    def happen(month: Month) -> None:
        for name in names:
            spoil(month.config, month.generations[-1], name)

    return happen


FIRST = Event(change_nothing)
USUAL = Event(Month.a_day, computed=(INPUTS_REASON,))
NO_CHANGE = Event(change_nothing)
AVID_DAY = Event(avid_day, computed=(INPUTS_REASON,))
LATE_ROWS = Event(late_rows)
AFTER_LATE_ROWS = Event(change_nothing, reads=LATE_REASON)
IN_BETWEEN = Event(in_between, reads=FILES_REASON, computed=(INPUTS_REASON,))
REWRITTEN = Event(rewritten, reads=FILES_REASON, computed=(INPUTS_REASON,))
ITEMS_REMOVED = Event(items_gone, computed=(INPUTS_REASON, ITEM_LOST_REASON))
RETURNED = Event(items_back, reads=BACK_REASON)
ERASED_USER = Event(erased("user"), reads=ERASED_REASON)
ERASED_ITEM = Event(erased("item"), reads=ERASED_REASON)
STOCK = Event(other_column("items.parquet", "stock", 0.02, stock))
ROLLED_BACK = Event(rolled_back)
RETRAINED = Event(retrained, no_copy_reason=OTHER_BUNDLE_REASON, copies=False)
RETRAINED_WITH_TABLES = Event(retrained, reads=TABLES_REASON, no_copy_reason=OTHER_BUNDLE_REASON, copies=False)
OTHER_K = Event(other_k, no_copy_reason=OTHER_SETTINGS_REASON, copies=False)
BAD_PAGES = Event(damaged("tables/user_topk/0000.pages"))
BAD_PARTITION = Event(damaged("work/partition/0001.rows"), reads=DAMAGED_REASON)
BAD_DIGESTS = Event(damaged(inputs_path(1), item_digests_path("item_tower")))
BAD_ATTRIBUTES = Event(damaged(f"{ATTRIBUTES_FOLDER}/0000.values"), copies=False)
OTHER_LOOKS = Event(
    other_column("items.parquet", "looks", 0.02, whole_vectors), computed=(ITEM_LOST_REASON, ENTERED_REASON)
)
SCENT = Event(other_column("items.parquet", "scent", 0.1, drawn_vectors(SCENTS)))
NEW_ITEMS = Event(new_items(2), computed=(ENTERED_REASON,))
MANY_NEW_ITEMS = Event(new_items(12), computed=(ITEM_LOST_REASON,), copies=False)
NAMED_EARLY = Event(named_before_it_is_there)
NAMED_COMES = Event(lambda month: add_items(month, [NAMED]), reads=BACK_REASON, computed=(INPUTS_REASON,))
MOOD = Event(other_column("users.parquet", "mood", 0.1, drawn_vectors(2)), reads=TABLES_REASON)
COUNTRY = Event(
    other_column("users.parquet", "country", 0.05, countries), reads=TABLES_REASON, computed=(INPUTS_REASON,)
)
OTHER_TOWER = Event(other_user_tower, reads=TABLES_REASON, no_copy_reason=OTHER_BUNDLE_REASON, copies=False)
OTHER_VALUES = Event(other_values, reads=TABLES_REASON, no_copy_reason=OTHER_BUNDLE_REASON, copies=False)
SHORTER_HISTORIES = Event(shorter_histories, reads=TABLES_REASON, no_copy_reason=OTHER_BUNDLE_REASON, copies=False)
VECTORS = Event(
    other_column("user_vectors.parquet", "vector", 0.1, drawn_vectors(16)),
    reads=TABLES_REASON, computed=(INPUTS_REASON,),
)  # fmt: skip


def check(month: Month, generation: str, events: Sequence[Event]) -> None:
    """Check that a night's report about its copies fits the changes before it."""
    base_note = month.build(generation).need_report(BEGIN_REPORT)["base"]
    expected_reason = next((event.no_copy_reason for event in events if event.no_copy_reason), "")
    reads = {event.reads for event in events if event.reads}
    assert base_note["why"] == expected_reason
    if expected_reason == OTHER_SETTINGS_REASON:
        assert base_note["generation"] is None and base_note["read_because"] == expected_reason
    else:
        assert base_note["generation"] == month.generations[-2]
        assert base_note["read_because"] in (reads or {""}), (base_note, reads)
        assert base_note["took_over"] == (not reads)
    reasons = month.reasons(generation)
    assert bool(reasons.get("copied")) == all(event.copies for event in events), reasons
    if not expected_reason:
        for computed_reasons in filter(None, (event.computed for event in events)):
            assert any(reasons[REASON_NAMES[reason]] for reason in computed_reasons), (computed_reasons, reasons)
