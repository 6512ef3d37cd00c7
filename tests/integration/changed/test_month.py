"""A month of nights that compute only what changed: every one has the bytes of a full night over the same inputs."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.changed import events
from tests.integration.changed.events import Event, check
from tests.integration.changed.month import Month
from tests.integration.changed.worlds import WORLDS, features

Nights = Sequence[tuple[Event, ...]]

USUAL = (events.USUAL,)
QUICK: dict[str, Nights] = {
    "reference": (
        (events.USUAL, events.ITEMS_REMOVED, events.STOCK),
        (events.USUAL, events.RETURNED, events.BAD_PAGES),
        (events.REWRITTEN, events.IN_BETWEEN, events.ERASED_USER, events.ERASED_ITEM),
        (events.ROLLED_BACK, events.BAD_DIGESTS, events.LATE_ROWS),
        (events.RETRAINED, events.AFTER_LATE_ROWS),
        (events.OTHER_K, events.AVID_DAY),
    ),
    "features": (
        (events.USUAL, events.OTHER_LOOKS, events.NAMED_EARLY),
        (events.NO_CHANGE,),
        (events.MOOD, events.COUNTRY),
        (events.NEW_ITEMS, events.NAMED_COMES, events.SCENT),
        (events.OTHER_VALUES,),
        (events.SHORTER_HISTORIES,),
        (events.OTHER_TOWER,),
        (events.USUAL, events.BAD_PARTITION),
    ),
}  # fmt: skip
"""Nights with all kinds of events, but vectors of users, of which `test_planted` has one."""
STORM: dict[str, Nights] = {
    "reference": (
        USUAL, (events.NO_CHANGE,), (events.USUAL, events.ITEMS_REMOVED), USUAL, (events.USUAL, events.RETURNED),
        (events.STOCK,), (events.USUAL, events.STOCK), (events.REWRITTEN,), (events.USUAL, events.IN_BETWEEN),
        (events.ERASED_USER,), USUAL, (events.ERASED_ITEM,), USUAL, (events.USUAL, events.ROLLED_BACK),
        (events.USUAL, events.RETRAINED), USUAL, (events.OTHER_K,), USUAL, (events.AVID_DAY,), USUAL,
        (events.USUAL, events.LATE_ROWS), (events.USUAL, events.AFTER_LATE_ROWS), USUAL,
        (events.USUAL, events.BAD_PAGES), (events.USUAL, events.BAD_PARTITION), (events.BAD_DIGESTS,),
        (events.BAD_ATTRIBUTES,), (events.USUAL, events.ITEMS_REMOVED, events.STOCK), (events.RETURNED,), USUAL,
    ),
    "features": (
        USUAL, (events.OTHER_LOOKS,), (events.USUAL, events.OTHER_LOOKS), (events.NEW_ITEMS,),
        (events.USUAL, events.NEW_ITEMS),
        (events.MOOD,), USUAL, (events.COUNTRY,), (events.USUAL, events.COUNTRY, events.MOOD), (events.SCENT,), USUAL,
        (events.USUAL, events.NAMED_EARLY), (events.NAMED_COMES,), (events.MANY_NEW_ITEMS,), USUAL,
        (events.ITEMS_REMOVED,),
        (events.USUAL, events.RETURNED), (events.OTHER_VALUES,), (events.SHORTER_HISTORIES,), USUAL,
        (events.OTHER_TOWER,), USUAL, (events.ERASED_ITEM,), (events.ERASED_USER,),
        (events.REWRITTEN, events.OTHER_LOOKS), USUAL, (events.ROLLED_BACK, events.OTHER_LOOKS),
        (events.BAD_PARTITION,),
        (events.USUAL, events.BAD_DIGESTS), (events.OTHER_K,), USUAL, (events.AVID_DAY,), (events.NO_CHANGE,),
    ),
    "vectors": (
        USUAL, (events.VECTORS,), (events.USUAL, events.ITEMS_REMOVED), (events.RETURNED,), USUAL,
        (events.VECTORS, events.REWRITTEN), (events.ERASED_USER,), (events.NO_CHANGE,),
        (events.RETRAINED_WITH_TABLES,), USUAL,
    ) * 3,
}  # fmt: skip


def run(month: Month, nights: Nights) -> None:
    """Run a first night, and then one after each of these changes."""
    assert month.differences(month.publish(), month.compute()) == []
    for number, happened in enumerate(nights, 1):
        month.night = number
        for event in happened:
            event.happen(month)
        generation = month.publish()
        assert month.differences(generation, month.compute()) == [], (number, happened)
        check(month, generation, happened)


@pytest.mark.parametrize("kind", QUICK)
def test_a_few_nights_have_the_bytes_of_full_ones(kind: str, tmp_path: Path, redis_url: str, seed: int) -> None:
    run(WORLDS[kind](tmp_path / "night", redis_url, seed), QUICK[kind])


def test_a_bundle_without_features_takes_no_table_of_them_over(tmp_path: Path, redis_url: str, seed: int) -> None:
    """Else who is known by features alone would be among its users."""
    month = features(tmp_path / "night", redis_url, seed, users=60, items=40)
    tables = {name: table_config for name, table_config in month.config.tables.items() if table_config.kind != "value"}
    month.configure(tables=tables)
    table = pq.read_table(month.config.path("users.parquet"))
    alone = table.slice(0, 3).set_column(0, "user", pa.array(["a", "b", "c"]))
    pq.write_table(pa.concat_tables([table, alone]), month.config.path("users.parquet"))

    run(month, [(events.RETRAINED_WITH_TABLES,)])


@pytest.mark.storm
@pytest.mark.parametrize("kind", STORM)
def test_a_month_of_nights_has_the_bytes_of_full_ones(kind: str, tmp_path: Path, redis_url: str, seed: int) -> None:
    run(WORLDS[kind](tmp_path / "night", redis_url, seed), STORM[kind])
