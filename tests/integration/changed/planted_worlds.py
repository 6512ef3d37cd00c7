"""Small worlds in which each planted defect makes a difference."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.ids import hash_ids
from precompute.config.settings import FilterConfig
from tests.integration.changed import events
from tests.integration.changed.month import Month
from tests.integration.changed.prepared import Prepared
from tests.integration.changed.worlds import LISTS, RARE, features, reference, vectors

SEED: Final = 20_260_131


def twins(month: Month) -> None:
    """Add items that equal others for every model and sort before them at equal scores."""
    path = month.config.path("items.parquet")
    table = pq.read_table(path)
    names = [f"twin-{number}" for number in range(400)]
    first = np.argsort(hash_ids([name.encode() for name in names], 0))[:5]
    rows = table.take(pa.array(month.rng.choice(len(table), 5, replace=False)))
    rows = rows.set_column(0, "item", pa.array([names[index] for index in first.tolist()]))
    pq.write_table(pa.concat_tables([table, rows]), path)


def unclicked(month: Month) -> None:
    """Remove the oldest clicks of a user with more clicks than a model takes."""
    path = month.file(0).with_name("day-000-avid.parquet")
    table = pq.read_table(path).sort_by("timestamp")
    users = table["user"].to_pylist()
    removed_rows = [row for row, user in enumerate(users) if user == events.AVID][:-16]
    pq.write_table(table.take(pa.array(sorted({*range(len(users))} - {*removed_rows}))), path)


def turned(brand: str) -> Callable[[Month], None]:
    """Three items of a brand come into stock, and one goes out of stock."""

    def happen(month: Month) -> None:
        path = month.config.path("items.parquet")
        table = pq.read_table(path).to_pylist()
        brand_rows = [row for row in table if row["brand"] == brand]
        out_of_stock_rows, in_stock_rows = (
            [row for row in brand_rows if row["stock"] is is_in_stock] for is_in_stock in (False, True)
        )
        for row in [*out_of_stock_rows[:3], in_stock_rows[0]]:
            row["stock"] = not row["stock"]
        pq.write_table(pa.Table.from_pylist(table, schema=pq.read_schema(path)), path)

    return happen


def with_few(month: Month) -> Month:
    """Return a month with so few items that lists have free places."""
    rare = {"and": [{"==": ["stock", True]}, {"==": ["brand", RARE]}]}
    month.configure(filters={"rare": FilterConfig(rare, LISTS)})
    return month


def with_exact_similar(month: Month) -> Month:
    """Return a month whose lists of similar items have unrounded scores."""
    similar = replace(month.config.tables["item_similar"], precision="f4")
    month.configure(tables={**month.config.tables, "item_similar": similar})
    return month


def prepared(folder: Callable[[], Path], redis_url: str) -> dict[str, Prepared]:
    """Return worlds by name, each in a folder of its own."""
    return {
        "users": Prepared.of(
            reference(folder(), redis_url, SEED), [], [events.USUAL, events.ITEMS_REMOVED]
        ),
        "filters": Prepared.of(
            reference(folder(), redis_url, SEED),
            [],
            [events.USUAL, events.ITEMS_REMOVED, events.Event(turned("usual"))],
        ),
        "histories": Prepared.of(
            reference(folder(), redis_url, SEED), [events.AVID_DAY], [events.Event(unclicked)]
        ),
        "vectors": Prepared.of(
            vectors(folder(), redis_url, SEED), [], [events.USUAL, events.ITEMS_REMOVED, events.VECTORS]
        ),
        "places": Prepared.of(
            with_few(reference(folder(), redis_url, SEED)),
            [],
            [events.Event(turned(RARE))],
        ),
        "items": Prepared.of(
            features(folder(), redis_url, SEED, items=160),
            [],
            [events.USUAL, events.OTHER_LOOKS, events.SCENT, events.COUNTRY],
        ),
        "ties": Prepared.of(
            with_exact_similar(features(folder(), redis_url, SEED, users=400, items=160)),
            [],
            [events.Event(twins)],
        ),
    }  # fmt: skip
