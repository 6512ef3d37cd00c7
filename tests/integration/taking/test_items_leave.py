"""Items that leave the catalogue after events named them: nights that copy are as full ones."""

import pyarrow as pa
import pyarrow.parquet as pq

from cache.events.event import Event
from precompute.builds.reports import BEGIN_REPORT
from precompute.reuse.inputs import NAMED_ITEM_GONE_REASON
from tests.integration.changed.month import Month, scored
from tests.integration.taking.clicking import click, microseconds, take_all_events


def lose(month: Month, item: str) -> None:
    path = month.config.path("items.parquet")
    table = pq.read_table(path)
    pq.write_table(table.filter(pa.array([item_scalar.as_py() != item for item_scalar in table["item"]])), path)


def test_users_of_an_item_that_left_are_in_no_night_that_copies_either(month: Month) -> None:
    quiet, named = month.ids("item")[:2]
    at = microseconds(month.cut) - 1
    click(month.config, [Event(f"e{n}", at, b"only-by-event-%d" % n, named.encode()) for n in range(9)])
    take_all_events(month.full)
    month.publish()
    reasons, users = [], []
    for number, item in enumerate([quiet, named], 1):
        month.night = number
        lose(month, item)
        full = scored(take_all_events(month.full), month.cut)

        generation = month.publish()

        assert month.differences(generation, full) == []
        begin_report = month.build(generation).need_report(BEGIN_REPORT)
        reasons.append(begin_report["base"]["read_because"])
        users.append(begin_report["users"])
    # If no event names an item, it may leave, and the base's rows are still taken over.
    assert reasons == ["", NAMED_ITEM_GONE_REASON] and users[0] - users[1] == 9
