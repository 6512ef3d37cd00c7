"""A night that copies as `plan` foretells it, beside the real one: whose inputs differ, which lists items touch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cache.process.redis_server import RedisServer
from precompute.config.settings import TableConfig
from precompute.planning.forecast import CopyingNight, forecast
from precompute.planning.options import PlanParameters
from tests.integration.changed.month import Month
from tests.integration.nights import prepare, top_lists

USERS, ITEMS, REMOVED_COUNT, K = 600, 200, 4, 10


@pytest.fixture
def month(tmp_path: Path, own_redis: RedisServer) -> Month:
    config = prepare(tmp_path / "month", own_redis.url, users=USERS, items=ITEMS)
    config = replace(config, tables={"user_topk": TableConfig("user_topk", k=K)})
    return Month.of(config, own_redis.url, seed=5)


def typical_items(month: Month, generation: str) -> list[str]:
    """Items that are in as many lists, and in as many histories, as the average."""
    files = [pq.read_table(month.file(number)) for number in range(month.night + 1)]
    interaction_pairs = {(user, item) for day_table in files for user, item in zip(*pairs(day_table), strict=True)}
    lists = top_lists(month.config, generation, month.ids("user"))
    item_counts = (
        Counter(item for _, item in interaction_pairs),
        Counter(i for listed_items in lists.values() for i in listed_items),
    )
    means = [sum(counts.values()) / ITEMS for counts in item_counts]

    def off(item: str) -> float:
        return sum(abs(counts[item] / mean - 1) for counts, mean in zip(item_counts, means, strict=True))

    return sorted(month.ids("item"), key=off)[:REMOVED_COUNT]


def pairs(table: pa.Table) -> tuple[list[str], list[str]]:
    """Users and items of interactions."""
    return table["user"].to_pylist(), table["item"].to_pylist()


def without(month: Month, items: list[str]) -> pa.Table:
    """Write the catalogue without these items; return the earlier one."""
    path = month.config.path("items.parquet")
    table = pq.read_table(path)
    is_kept = pc.invert(pc.is_in(table["item"], pa.array(items)))
    pq.write_table(table.filter(is_kept), path)
    return table


def foretold(month: Month, items_changed: float) -> CopyingNight:
    """Return the prediction for the next night."""
    plan_parameters = PlanParameters(data_until=month.cut.isoformat(), seconds=0.2, items_changed=items_changed)
    night_forecast = forecast(month.config, plan_parameters)
    (copying,) = night_forecast.copying_nights
    assert 0 < copying.scoring.cpu_s < night_forecast.timings.total.cpu_s
    assert "in the last day before the cut" in night_forecast.copying_note
    return copying


def measure_shares(month: Month, generation: str) -> dict[str, float]:
    """Users by reason, as shares."""
    count_by_reason = month.reasons(generation)
    return {name: count / sum(count_by_reason.values()) for name, count in count_by_reason.items()}


def test_what_is_foretold_is_what_a_small_night_finds(month: Month) -> None:
    first = month.publish()

    # a usual day: only users change
    month.night = 1
    month.a_day()
    predicted_night, measured_shares = foretold(month, 0.0), measure_shares(month, month.publish())
    assert measured_shares["inputs"] == pytest.approx(predicted_night.inputs, abs=0.01)
    assert measured_shares["copied"] == pytest.approx(predicted_night.copied, abs=0.01)

    # a day on which items disappear
    month.night = 2
    month.a_day()
    removed_items = typical_items(month, first)
    catalogue = without(month, removed_items)
    predicted_night, measured_shares = (foretold(month, REMOVED_COUNT / ITEMS), measure_shares(month, month.publish()))
    assert measured_shares["inputs"] == pytest.approx(predicted_night.inputs, abs=0.06)
    assert measured_shares["lost"] == pytest.approx(predicted_night.lost, abs=0.06)
    assert measured_shares["copied"] >= predicted_night.copied - 0.05

    # a day on which they are back: items enter lists, and no list loses one
    month.night = 3
    month.a_day()
    pq.write_table(catalogue, month.config.path("items.parquet"))
    predicted_night, measured_shares = (foretold(month, REMOVED_COUNT / ITEMS), measure_shares(month, month.publish()))
    assert measured_shares["lost"] == 0.0
    assert measured_shares["entered"] == pytest.approx(predicted_night.lost, abs=0.06)
    assert measured_shares["copied"] >= predicted_night.copied - 0.05
