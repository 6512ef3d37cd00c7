"""Training from the sources: what is handed to the trainer, and what that takes of memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import ConfigError, SourceError
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, ReferenceConfig, Sources
from precompute.reference import train as operation
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train, train_reference
from precompute.sources.columns import Ids

ITEMS = 50_000


class Handed(Exception):
    """Raised in the trainer's place, with what it was given."""


def prepared(folder: Path, items: list[str], features: dict[str, Any] | None = None) -> NightConfig:
    """Ten users and an interaction with each item, in this order."""
    users = [f"user-{row % 10}" for row in range(len(items))]
    times = pa.array(np.arange(len(items)), pa.timestamp("s"))
    table = {"user": users, "item": items, "timestamp": times}
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    if features is not None:
        pq.write_table(pa.table(features), folder / "items.parquet")
    sources = Sources(("interactions.parquet",), item_features=None if features is None else "items.parquet")
    return NightConfig(
        base=str(folder), artifacts="artifacts", bundle="bundle", sources=sources,
        reference=ReferenceConfig(dims=4),
    )  # fmt: skip


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `train_reference` and gives what it hands to the trainer."""

    def caught(data: ReferenceData, *_arguments: Any, **_named: Any) -> None:
        raise Handed(data)

    monkeypatch.setattr(operation, "train", caught)

    def run(config: NightConfig) -> ReferenceData:
        with pytest.raises(Handed) as exception_info:
            train_reference(config)
        data: ReferenceData = exception_info.value.args[0]
        return data

    return run


def test_a_training_asks_for_the_texts_of_no_column(tmp_path, monkeypatch):
    """Two billion bytes of user ids ended it as an internal error."""
    config = prepared(tmp_path, [f"item-{row % 30}" for row in range(200)])

    def texts(_ids: Ids) -> None:
        pytest.fail("the texts of all rows")

    monkeypatch.setattr(Ids, "row_texts", texts)

    assert train_reference(config)["items"] == 30


@pytest.mark.parametrize(
    ("items", "message_pattern"),
    [
        (["only"], "1 user and 1 item; at least 2 users and 2 items are needed"),
        (["only"] * 10, "10 users and 1 item; at least 2 users"),
        ([f"item-{row}" for row in range(10)], "each of the 10 users has one item"),
    ],
)
def test_too_little_to_learn_from_is_said_as_that(tmp_path, items, message_pattern):
    with pytest.raises(SourceError, match=f"too little data: {message_pattern}"):
        train_reference(prepared(tmp_path, items))


def test_what_is_newer_than_the_cut_of_the_settings_is_not_learnt(tmp_path):
    """The gate on the future judges by it."""
    config = prepared(tmp_path, [f"item-{row % 30}" for row in range(200)])

    train_reference(replace(config, data_until="1970-01-01T00:01:40Z"))

    training_facts = Bundle.open(tmp_path / "bundle").training
    assert training_facts["trained_until"] == "1970-01-01T00:01:39+00:00"


@pytest.mark.parametrize("column", ["", "timestamp"])
def test_a_cut_of_interactions_without_times_is_refused(tmp_path, column):
    """It left nothing out, and the model learnt what judges it."""
    config = prepared(tmp_path, [f"item-{row % 30}" for row in range(200)])
    if column:
        table = pq.read_table(tmp_path / "interactions.parquet")
        zeros = pa.array([0] * len(table), pa.timestamp("s"))
        pq.write_table(table.set_column(2, column, zeros), tmp_path / "interactions.parquet")
    config = replace(config, sources=replace(config.sources, timestamp_column=column))

    with pytest.raises(ConfigError, match=r"no interaction has a time.*timestamp_column"):
        train_reference(config, data_until="2024-01-01T00:00:00Z")

    assert train_reference(config)["untimed"] == 200


def test_no_python_object_is_made_per_item(tmp_path, handed):
    """Ids as a list and categories as a dictionary took 400 bytes of each of ten million items."""
    names = [f"item-{number:030d}" for number in range(ITEMS)]
    config = prepared(tmp_path, names, {"item": names, "category": ["a", "b"] * (ITEMS // 2)})

    tracemalloc.start()
    data = handed(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(data.item_ids) == len(data.category_by_item) == ITEMS
    assert peak < 160 * ITEMS


def test_categories_are_the_first_that_an_item_is_given_as_in_the_night_else_unknown(tmp_path, handed):
    features = {"item": ["c", "a", "stranger", "d", "a", "e"], "category": ["red", "blue", "green", None, "red", ""]}

    data = handed(prepared(tmp_path, ["a", "b", "c", "d", "e"], features))

    assert data.item_ids.to_pylist() == ["a", "b", "c", "d", "e"]
    assert data.category_by_item.to_pylist() == ["blue", "unknown", "red", "unknown", "unknown"]


def test_a_bundle_of_arrow_texts_is_the_bundle_of_python_texts(tmp_path):
    rng = np.random.default_rng(0)
    names, groups = [f"item-{row}" for row in range(20)], ["b", "ä", "a", "B"] * 5
    ids_and_categories = [(names, groups), (pa.array(names, pa.large_string()), pa.array(groups))]
    rows = rng.integers(0, 40, 400), rng.integers(0, 20, 400)

    python_bundle, arrow = (
        train(ReferenceData(*rows, *texts), tmp_path / str(number), dims=4, shape=SpectralShape())
        for number, texts in enumerate(ids_and_categories)
    )

    assert python_bundle.value_models["user_affinity"].labels == arrow.value_models["user_affinity"].labels
    assert python_bundle.vocabulary_digest == arrow.vocabulary_digest
    assert [model.sha256 for model in python_bundle.models] == [model.sha256 for model in arrow.models]
