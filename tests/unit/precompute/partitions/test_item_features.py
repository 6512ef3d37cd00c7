"""Feature columns of items: whatever their type and number, some rows at a time are Python objects."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.model.tower import AnyTower, Inputs
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.config.settings import NightConfig, Sources
from precompute.partitions import catalogue
from precompute.partitions.catalogue import (
    ITEM_FEATURES_FILE,
    ItemFeatures,
    open_items,
    write_catalogue,
    write_item_features,
)
from precompute.scoring.items import embed_catalogue
from precompute.sources.unusable import UnusableRows
from precompute.sources.vocabulary import Vocabulary, to_string_chunks

ITEMS = 100_000
TITLE = InputSpec("title", "feature", "string", column="title")
PRICE = InputSpec("price", "feature", "float32", column="price")
SPEC = TowerSpec((TITLE, PRICE), "values", 2)


class Lengths:
    """Length of an item's title and its price."""

    spec = SPEC

    def run(self, inputs: Inputs) -> Any:
        titles, prices = inputs["title"], inputs["price"]
        assert isinstance(titles, np.ndarray) and isinstance(prices, np.ndarray)
        return np.array([list(map(len, titles)), prices], np.float32).T


def bundle_of(names: list[str]) -> Any:
    """A vocabulary, and one value model that wants a text and a number of each item."""
    model = SimpleNamespace(name="values", entity="item", spec=SPEC)
    vocabulary = Vocabulary.of(to_string_chunks(pa.chunked_array([pa.array(names)])))
    return SimpleNamespace(vocabulary=vocabulary, models=(model,), value_models={"values": model})


def write_features(folder: Path, columns: dict[str, Any]) -> NightConfig:
    pq.write_table(pa.table(columns), folder / "items.parquet")
    return NightConfig(base=str(folder), sources=Sources(item_features="items.parquet"))


def test_no_step_makes_a_python_object_per_item_text(tmp_path):
    """A title took 250 bytes of each of ten million items, in five steps."""
    names = [f"i{number}" for number in range(ITEMS)]
    titles = pa.array([f"{number:0200d}" for number in range(ITEMS)])
    config = write_features(tmp_path, {"item": names, "title": titles, "price": np.ones(ITEMS)})
    bundle = bundle_of(names)
    items = open_items(tmp_path, write_catalogue(config, bundle, tmp_path))
    tower = cast(AnyTower, Lengths())

    tracemalloc.start()
    write_item_features(config, bundle, items, tmp_path)
    pinned = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    features = ItemFeatures.open(tmp_path / ITEM_FEATURES_FILE, SPEC, items.count)
    usable = features.usable_mask()
    lengths = sum(int(vectors[:, 0].sum()) for vectors in embed_catalogue(tower, items, features))
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert usable.all() and lengths == 200 * ITEMS
    assert pinned < 120 * ITEMS and read < 120 * ITEMS


@pytest.mark.parametrize("at_once", [1, 3, 1 << 14])
def test_values_and_notes_are_the_same_however_many_are_read_at_once(tmp_path, monkeypatch, at_once):
    names = [f"i{number}" for number in range(10)]
    prices = pa.array([*range(5), None, float("nan"), float("inf"), 8, 9], pa.float64())
    titles = pa.array([None, *(name.upper() for name in names[1:])])
    config = write_features(tmp_path, {"item": names, "title": titles, "price": prices})
    bundle, unusable = bundle_of(names), UnusableRows()
    items = open_items(tmp_path, write_catalogue(config, bundle, tmp_path))
    monkeypatch.setattr(catalogue, "FEATURE_ROWS_AT_ONCE", at_once)

    write_item_features(config, bundle, items, tmp_path, unusable=unusable)
    features = ItemFeatures.open(tmp_path / ITEM_FEATURES_FILE, SPEC, items.count)
    inputs, usable = features.of(np.arange(items.count))

    ids = [items.id_of(ordinal) for ordinal in range(items.count)]
    assert {name for name, fits in zip(ids, usable, strict=True) if not fits} == {"i0", "i5", "i6", "i7"}
    assert features.usable_mask().tolist() == usable.tolist()
    for ordinal in np.flatnonzero(usable).tolist():
        assert inputs["title"][ordinal] == ids[ordinal].upper()
        assert inputs["price"][ordinal] == int(ids[ordinal][1:])
        item_input, fits = features.of(np.array([ordinal]))
        assert (item_input["title"][0], item_input["price"][0]) == (inputs["title"][ordinal], inputs["price"][ordinal])
        assert fits.all()
    column_report = unusable.to_json()["item_features.price"]
    cases = column_report["reasons"]["price: not finite as float32"]["cases"]
    assert (column_report["rows"], column_report["left_out"]) == (10, 2)
    assert sorted(str(case["item"]) for case in cases) == ["i6", "i7"]
