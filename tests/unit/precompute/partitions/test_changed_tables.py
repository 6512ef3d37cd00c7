"""Files of a night with what events set are those of a night over a table that had it: byte by byte."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.config.settings import NightConfig, Sources
from precompute.filters.item_attributes import write_item_attributes
from precompute.partitions.catalogue import ITEM_FEATURES_FILE, open_items, write_catalogue, write_item_features
from precompute.partitions.night_input import NO_EVENT_VALUES, NightInput
from precompute.partitions.partition import PartitionJob
from precompute.partitions.shard_input import read_shard
from precompute.sources.features import NO_ENTITY_VALUES, EntityValues
from precompute.sources.unusable import UnusableRows
from precompute.sources.vocabulary import Vocabulary, to_string_chunks
from tests.unit.precompute.partitions.test_partition import item_table

IDS = [f"i{number}" for number in range(8)]
NAMES = ("brand", "tags", "price", "stock", "since")
TABLE: dict[str, Any] = {
    "brand": pa.array(["x", "y", None, "x", "é", "x", "z", "z"]),
    "tags": pa.array([["a"], [], None, ["b", "a"], ["c"], ["a"], [], ["b"]]),
    "price": pa.array([1.5, 2, None, 4, 5, 6, 7, 8], pa.float64()),
    "stock": pa.array([True, False, None, True, True, False, True, True]),
    "since": pa.array([0, 1, None, 3, 4, 5, 6, 7], pa.timestamp("us", "UTC")),
}
SET: EntityValues = {
    b"i4": {"brand": "new", "tags": ["b", "new"], "price": 9, "stock": False, "since": "1970-01-01T00:00:01Z"},
    b"i6": {"brand": None, "tags": None, "price": None, "stock": None, "since": None},
    b"i7": {"brand": "x", "price": 0.25, "other": "no attribute"},
    b"nobody": {"brand": "elsewhere"},
}  # fmt: skip


def apply_values(values: EntityValues) -> dict[str, Any]:
    """The table with these values; a time is always the same one."""
    changed_columns = {}
    for name, column in TABLE.items():
        is_time = name == "since"
        rows = (column.cast(pa.int64()) if is_time else column).to_pylist()
        for at, id_ in enumerate(IDS):
            if name in (entity_values := values.get(id_.encode(), {})):
                rows[at] = 1_000_000 if is_time and entity_values[name] is not None else entity_values[name]
        changed_columns[name] = pa.array(rows, pa.int64() if is_time else column.type).cast(column.type)
    return changed_columns


def written(
    folder: Path, table: dict[str, Any], values: EntityValues, unusable: UnusableRows | None = None
) -> dict[str, Any]:
    """Kind and bytes of every file of attributes."""
    folder.mkdir()
    pq.write_table(pa.table({"item": IDS, **table}), folder / "items.parquet")
    sources = Sources(item_features="items.parquet", item_attributes=NAMES)
    config = NightConfig(shards=1, sources=sources, base=str(folder))
    bundle: Any = SimpleNamespace(vocabulary=Vocabulary.of(to_string_chunks(pa.chunked_array([IDS]))), models=[])
    items = open_items(folder, write_catalogue(config, bundle, folder))
    files = write_item_attributes(config, items, folder, event_values=values, unusable=unusable)
    return {
        name: (kind, {part: (folder / path).read_bytes() for part, path in paths.items()})
        for name, (kind, paths) in files.items()
    }


def test_attributes_are_those_of_the_changed_table(tmp_path: Path) -> None:
    unusable = UnusableRows()

    attribute_files = written(tmp_path / "events", TABLE, SET, unusable)

    assert attribute_files == written(tmp_path / "table", apply_values(SET), NO_ENTITY_VALUES)
    assert attribute_files != written(tmp_path / "before", TABLE, NO_ENTITY_VALUES)
    assert all(not source_report["reasons"] for source_report in unusable.to_json().values())


def test_an_attribute_of_another_kind_is_noted(tmp_path: Path) -> None:
    unusable = UnusableRows()

    attribute_files = written(tmp_path / "events", TABLE, {b"i4": {"price": "seven", "brand": 7}}, unusable)

    cleared: EntityValues = {b"i4": {"price": None, "brand": None}}
    assert attribute_files == written(tmp_path / "table", apply_values(cleared), NO_ENTITY_VALUES)
    unusable_report = unusable.to_json()
    assert unusable_report["events.price"]["reasons"]["not a finite number"]["cases"] == [{"item": "i4"}]
    assert unusable_report["events.brand"]["reasons"]["not a text"]["rows"] == 1


def pinned(folder: Path, prices: list[float | None], values: EntityValues) -> tuple[bytes, list[str]]:
    """The pinned columns, and the catalogue that the item tower can use."""
    folder.mkdir()
    table = {"item": IDS, "price": pa.array(prices, pa.float64()), "title": [f"t{item_id}" for item_id in IDS]}
    pq.write_table(pa.table(table), folder / "items.parquet")
    config = NightConfig(base=str(folder), shards=1, sources=Sources(item_features="items.parquet"))
    inputs = (
        InputSpec("price", "feature", "float32", column="price"),
        InputSpec("title", "feature", "string", column="title"),
    )
    model = SimpleNamespace(name="item_tower", entity="item", spec=TowerSpec(inputs, "vector", 2))
    bundle: Any = SimpleNamespace(
        vocabulary=Vocabulary.of(to_string_chunks(pa.chunked_array([IDS]))), models=(model,), value_models={}
    )
    items = open_items(folder, write_catalogue(config, bundle, folder, event_values=values))
    write_item_features(config, bundle, items, folder, event_values=values)
    return (folder / ITEM_FEATURES_FILE).read_bytes(), [items.id_of(at) for at in range(items.count)]


def test_features_and_catalogue_are_those_of_the_changed_table(tmp_path: Path) -> None:
    original_prices: list[float | None] = [1, 2, None, 4, 5, 6, 7, 8]
    after: list[float | None] = [1, 9, 3, 4, None, 6, 7, 8]
    values: EntityValues = {b"i1": {"price": 9}, b"i2": {"price": 3}, b"i4": {"price": None}}

    features_and_ids = pinned(tmp_path / "events", original_prices, values)

    assert features_and_ids == pinned(tmp_path / "table", after, NO_ENTITY_VALUES)
    assert set(features_and_ids[1]) == {*IDS} - {"i4"}


@pytest.mark.parametrize("shards", [1, 3])
def test_users_are_those_of_the_changed_table(tmp_path: Path, shards: int) -> None:
    def users(name: str, rows: dict[str, int | None], values: EntityValues) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        clicks = {"user": ["a", "b", "c"], "item": ["i1", "i2", "i3"], "timestamp": [1, 2, 3]}
        pq.write_table(pa.table(clicks), folder / "clicks.parquet")
        ages = {"user": list(rows), "age": pa.array(rows.values(), pa.int64())}
        pq.write_table(pa.table(ages), folder / "users.parquet")
        sources = Sources(interactions=("clicks.parquet",), user_features="users.parquet")
        config = NightConfig(base=str(folder), shards=shards, sources=sources)
        items = item_table([item_id.encode() for item_id in IDS])
        night = NightInput(config, items, values=NO_EVENT_VALUES._replace(user_values=values))
        PartitionJob(night, folder / "work", feature_columns=["age"]).run()
        inputs_by_user: dict[str, Any] = {}
        for shard in range(shards):
            part = read_shard(folder / "work", shard, history_limit=9)
            ages_ = part.features["age"].to_pylist()
            spans = [
                part.history_ordinals[a:b].tolist()
                for a, b in zip(part.history_indptr, part.history_indptr[1:], strict=False)
            ]
            names = part.entity_ids.to_pylist()
            inputs_by_user |= {name: user_input for name, *user_input in zip(names, ages_, spans, strict=True)}
        return inputs_by_user

    values: EntityValues = {
        b"a": {"age": 9}, b"b": {"age": None}, b"new": {"age": 5, "other": 1}, b"none": {"age": None},
        b"else": {"other": 1},
    }  # fmt: skip
    inputs_with_events = users("events", {"a": 1, "b": 2, "c": 3}, values)

    assert inputs_with_events == users("table", {"a": 9, "b": None, "c": 3, "new": 5}, NO_ENTITY_VALUES)
    assert set(inputs_with_events) == {"a", "b", "c", "new"}
