"""New items become vectors as a night makes them of all items; what the models cannot take is refused in words."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.events.event import Event
from cache.events.new_items import (
    ITEM_COLUMN_FACT,
    ITEM_VECTORS_FACT,
    NEW_VECTOR_ABS_MAX,
    TOWER_RETRY_PAUSES_S,
    FixedItems,
    NewItemInputs,
    NewItemTower,
    UnfitNewItem,
)
from cache.events.newer_events import VALUES_PER_ENTITY_MAX
from cache.model.new_items import NewItem
from cache.model.tower_spec import InputSpec
from tests.models import item_table, train_small

DIMS = 16
LOOKS_INPUT = InputSpec("looks", "feature", "float32", column="looks", width=DIMS)
INDEX = InputSpec("item_index", "item_index", "int64")


def manifest(*inputs: InputSpec, **facts: Any) -> Any:
    """A manifest, as far as it tells of items."""
    spec = {"inputs": [asdict(input_spec) for input_spec in inputs], "output": "vector", "output_dims": DIMS}
    models = {"item_tower": SimpleNamespace(spec=spec)} if inputs else {}
    return SimpleNamespace(facts=facts, models=models, items=SimpleNamespace(dims=4))


def brings(**event_fields: Any) -> Event:
    return Event("e", 0, item=b"new", **event_fields)


LONG = {"looks": (0.5,) * DIMS}


@pytest.mark.parametrize(
    ("inputs", "event", "code", "field", "says"),
    [
        (manifest(LOOKS_INPUT), brings(vector=(1.0,)), "unfit_item", "vector",
        "takes looks and computes the vector itself"),
        (manifest(LOOKS_INPUT), brings(features={"size": 1}), "unfit_item", "features", "looks is missing"),
        (manifest(LOOKS_INPUT), brings(features={"looks": (1.0,)}), "unfit_item", "features.looks", "takes 16 numbers"),
        (
            manifest(LOOKS_INPUT),
            brings(features=LONG, attributes={f"a{at}": 1 for at in range(VALUES_PER_ENTITY_MAX)}),
            "unfit_item", "features", "65 features and attributes, at most 64",
        ),
        (manifest(INDEX), brings(features=LONG), "fixed_items", "features", "import the bundle again"),
        (manifest(INDEX, LOOKS_INPUT), brings(vector=(1.0,)), "fixed_items", "vector", "takes an item's index"),
        (manifest(), brings(vector=(1.0,)), "fixed_items", "vector", "import the bundle again"),
        (
            manifest(INDEX, **{ITEM_VECTORS_FACT: True}), brings(vector=(1.0, 2.0)),
            "unfit_item", "vector", "vectors of 4 numbers, not 2",
        ),
        (
            manifest(INDEX, **{ITEM_VECTORS_FACT: True}), brings(vector=(1.0, -1e13, 0.0, 0.0)),
            "unfit_item", "vector", r"a number of 1e\+13, at most 65,504",
        ),
        (
            manifest(INDEX, **{ITEM_VECTORS_FACT: True}), brings(features=LONG),
            "unfit_item", "features", "send a vector of 4 numbers",
        ),
    ],
)  # fmt: skip
def test_what_models_cannot_take_is_refused_with_the_remedy(
    inputs: Any, event: Event, code: str, field: str, says: str
) -> None:
    with pytest.raises(UnfitNewItem, match=says) as refused:
        NewItemInputs.of(inputs).check(event)
    assert (refused.value.code, refused.value.details["field"]) == (code, field)
    assert isinstance(refused.value, FixedItems) == (code == "fixed_items")


def test_what_models_take_is_not_refused() -> None:
    NewItemInputs.of(manifest(LOOKS_INPUT)).check(brings(features={**LONG, "price": 3}))
    NewItemInputs.of(manifest(INDEX, **{ITEM_VECTORS_FACT: True})).check(brings(vector=(1.0,) * 4))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return item_table(train_small(tmp_path_factory.mktemp("bundle"), dims=DIMS))


def test_vectors_are_the_towers_and_of_items_that_the_generation_lacks(table: Any) -> None:
    rng, runs = np.random.default_rng(1), []
    projection = rng.standard_normal((DIMS, DIMS)).astype(np.float32)

    def run(inputs: Any) -> Any:
        runs.append(len(inputs["looks"]))
        with np.errstate(over="ignore", invalid="ignore"):
            return inputs["looks"] @ projection

    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    new_item_tower = NewItemTower(NewItemInputs((LOOKS_INPUT,)), tower)
    look_features = rng.standard_normal((300, DIMS)).astype(np.float32)
    values: dict[bytes, dict[str, Any]] = {
        b"new-%d" % at: {"looks": row.tolist()} for at, row in enumerate(look_features)
    }
    new_items = [NewItem(raw, at + 1) for at, raw in enumerate(values)]
    table_item = NewItem(table.raw_id(0), 400)
    odd = [NewItem(b"none", 401), NewItem(b"null", 402), NewItem(b"huge", 403)]
    extra_values: dict[bytes, dict[str, Any]] = {
        b"null": {"looks": None},
        b"huge": {"looks": [3e38] * DIMS},
        table_item.raw_id: values[b"new-1"],
    }

    embedded_items = new_item_tower.compute_new_items(table, [*new_items, table_item, *odd], {**values, **extra_values})

    assert embedded_items.first_item_number == table.count and [item.raw_id for item in embedded_items.items] == list(
        values
    )
    np.testing.assert_allclose(embedded_items.vectors, look_features @ projection, rtol=1e-5, atol=1e-5)
    assert sum(runs) == 301
    # Known items are not computed again, changed ones are.
    runs.clear()
    changed_values = values | {b"new-7": {"looks": look_features[9].tolist()}, b"new-8": {"looks": [1.0] * DIMS}}
    updated_items = new_item_tower.compute_new_items(table, new_items[5:], changed_values, embedded_items)
    assert runs == [1] and updated_items.digest != embedded_items.digest
    np.testing.assert_array_equal(updated_items.vectors[2], embedded_items.vectors[9])
    np.testing.assert_array_equal(updated_items.vectors[5:], embedded_items.vectors[10:])
    assert updated_items.ids_of(table, np.array([table.count, 0, table.count + 2], np.uint32)) == [
        "new-5", table.id_of(0), "new-7",
    ]  # fmt: skip
    raws = [b"new-6", table.raw_id(3), b"nobody"]
    assert updated_items.item_numbers_of(raws, table.ordinals_of(raws)).tolist() == [table.count + 1, 3, -1]


def test_an_item_that_the_tower_raises_on_costs_the_others_nothing(table: Any) -> None:
    runs: list[int] = []

    def run(inputs: Any) -> Any:
        runs.append(len(inputs["category"]))
        return np.eye(DIMS, dtype=np.float32)[inputs["category"]]  # IndexError, as ONNX Runtime's

    category = InputSpec("category", "feature", "int32", column="category")
    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    new_item_tower = NewItemTower(NewItemInputs((category,)), tower)
    values = {b"new-%d" % at: {"category": 99_999 if at == 5 else at % DIMS} for at in range(40)}
    new_items = [NewItem(raw, at + 1) for at, raw in enumerate(values)]

    embedded_items = new_item_tower.compute_new_items(table, new_items, values)

    assert [item.raw_id for item in embedded_items.items] == [item for item in values if item != b"new-5"]
    # An item on which the tower raised is not retried at once, neither alone nor with others.
    runs.clear()
    values[b"late"] = {"category": 3}
    updated_items = new_item_tower.compute_new_items(table, [*new_items, NewItem(b"late", 99)], values, embedded_items)
    assert len(updated_items) == 40 and runs == []
    failed_items = new_item_tower.compute_new_items(
        table, new_items[5:6], values, new_item_tower.compute_new_items(table, new_items[5:6], values)
    )
    assert not failed_items and len(failed_items.next_try_by_input) == 1
    # Once its values are set to what the tower takes, it is an item like any other.
    values[b"new-5"] = {"category": 5}
    assert b"new-5" in new_item_tower.compute_new_items(table, new_items, values, updated_items).item_number_by_id


def test_an_error_of_the_tower_that_passes_costs_an_item_seconds_and_not_its_life(table: Any) -> None:
    calls: list[int] = []
    is_full = True

    def run(inputs: Any) -> Any:
        calls.append(len(inputs["category"]))
        if is_full:
            raise MemoryError
        return np.eye(DIMS, dtype=np.float32)[inputs["category"]]

    category = InputSpec("category", "feature", "int32", column="category")
    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    new_item_tower = NewItemTower(NewItemInputs((category,)), tower)
    values = {b"new-%d" % at: {"category": at} for at in range(4)}
    new_items = [NewItem(raw, at + 1) for at, raw in enumerate(values)]

    first = new_item_tower.compute_new_items(table, new_items, values, now_s=50.0)
    is_full = False
    early = new_item_tower.compute_new_items(table, new_items, values, first, now_s=50.9)
    later = new_item_tower.compute_new_items(table, new_items, values, early, now_s=51.0)

    assert not first and not early and first.next_retry_at_s == early.next_retry_at_s == 51.0
    assert [item.raw_id for item in later.items] == list(values) and not later.next_try_by_input
    assert later.next_retry_at_s == math.inf and not later.refused_inputs
    assert calls[-1] == 4  # together again


def test_what_the_tower_always_raises_on_is_tried_again_a_few_times_and_then_refused_for_good(table: Any) -> None:
    calls: list[int] = []

    def run(inputs: Any) -> Any:
        calls.append(len(inputs["category"]))
        return np.eye(DIMS, dtype=np.float32)[inputs["category"]]

    category = InputSpec("category", "feature", "int32", column="category")
    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    new_item_tower = NewItemTower(NewItemInputs((category,)), tower)
    values: dict[bytes, dict[str, Any]] = {b"bad": {"category": 99_999}, b"fine": {"category": 3}}
    new_items = [NewItem(raw, at + 1) for at, raw in enumerate(values)]
    now_s, embedded_items, tried = (0.0, new_item_tower.compute_new_items(table, new_items, values, now_s=0.0), [])
    calls.clear()
    while embedded_items.next_try_by_input:
        tried.append(embedded_items.next_retry_at_s - now_s)
        now_s = embedded_items.next_retry_at_s
        embedded_items = new_item_tower.compute_new_items(table, new_items, values, embedded_items, now_s=now_s)
        assert [item.raw_id for item in embedded_items.items] == [b"fine"]

    assert tuple(tried) == TOWER_RETRY_PAUSES_S and calls == [1] * len(TOWER_RETRY_PAUSES_S)
    assert len(embedded_items.refused_inputs) == 1 and embedded_items.next_retry_at_s == math.inf
    assert (
        new_item_tower.compute_new_items(table, new_items, values, embedded_items, now_s=1e9).refused_inputs
        == embedded_items.refused_inputs
    )
    assert calls == [1] * len(TOWER_RETRY_PAUSES_S)
    # Another value of the item makes another input.
    changed_values = {**values, b"bad": {"category": 2}}
    taken_items = new_item_tower.compute_new_items(table, new_items, changed_values, embedded_items, now_s=now_s)
    assert taken_items.item_number_by_id.keys() == {b"bad", b"fine"}
    # An item that leaves before its retry is forgotten.
    assert not new_item_tower.compute_new_items(
        table, new_items[1:], values, new_item_tower.compute_new_items(table, new_items, values)
    ).next_try_by_input


def test_vectors_that_are_sent_are_taken_where_items_are_a_table_of_them(table: Any) -> None:
    new_item_tower = NewItemTower(NewItemInputs(dims=2))
    rows = [np.array(components, np.float32) for components in ([1, 2], [3], [4, 5])]
    new_items = [NewItem(b"new-%d" % at, at + 1, row) for at, row in enumerate(rows)]

    embedded_items = new_item_tower.compute_new_items(table, [*new_items, NewItem(b"bare", 9)], {})

    assert [item.raw_id for item in embedded_items.items] == [b"new-0", b"new-2"]
    assert embedded_items.vectors.tolist() == [[1, 2], [4, 5]] and not embedded_items.vectors.flags.writeable
    assert not NewItemTower(NewItemInputs()).compute_new_items(table, new_items, {})


def test_vectors_are_bounded_by_those_of_the_generation_where_these_go_beyond(table: Any, tmp_path: Path) -> None:
    new_items = [
        NewItem(b"new-%d" % at, at + 1, np.full(4, size, np.float32))
        for at, size in enumerate([NEW_VECTOR_ABS_MAX, -65_505, 1e30])
    ]
    of = manifest(INDEX, **{ITEM_VECTORS_FACT: True})
    for size, fit in ((1.0, 1), (1e5, 2)):
        generation_items: Any = SimpleNamespace(vectors=np.full((3, 4), size, np.float32))
        new_item_tower = NewItemTower.open(of, tmp_path, generation_items, threads=1, cores=())
        assert len(new_item_tower.compute_new_items(table, new_items, {})) == fit
        new_item_tower.inputs.check(brings(vector=(max(NEW_VECTOR_ABS_MAX, size),) * 4))
        with pytest.raises(UnfitNewItem):
            new_item_tower.inputs.check(brings(vector=(max(NEW_VECTOR_ABS_MAX, size) * 1.01,) * 4))


NAME = InputSpec("name", "feature", "string", column="item")


def test_the_id_as_a_feature_is_that_of_the_event(table: Any) -> None:
    """It had to be sent once more, and could be another one."""
    inputs = NewItemInputs.of(manifest(LOOKS_INPUT, NAME, **{ITEM_COLUMN_FACT: "item"}))
    inputs.check(brings(features=LONG))
    inputs.check(brings(features={**LONG, "item": "new"}))
    with pytest.raises(UnfitNewItem, match=r"features.item is 'other', but the event's item is 'new'"):
        inputs.check(brings(features={**LONG, "item": "other"}))

    names: list[str] = []

    def run(tower_inputs: Any) -> Any:
        names.extend(tower_inputs["name"].tolist())
        return tower_inputs["looks"]

    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    values: dict[bytes, dict[str, Any]] = {
        b"new": {"looks": [0.5] * DIMS},
        b"b": {"looks": [1.0] * DIMS, "item": "other"},
    }
    NewItemTower(inputs, tower).compute_new_items(table, [NewItem(b"new", 1), NewItem(b"b", 2)], values)

    assert names == ["new", "b"]


def test_the_id_as_a_number_is_one(table: Any) -> None:
    number = InputSpec("name", "feature", "int64", column="sku")
    inputs = NewItemInputs.of(manifest(number, **{ITEM_COLUMN_FACT: "sku"}))

    assert inputs.with_id({}, "17") == {"sku": 17}


def test_items_on_which_the_tower_fails_are_named(table: Any) -> None:
    tower: Any = SimpleNamespace(
        run=lambda tower_inputs: tower_inputs["looks"] * np.float32(np.nan), spec=SimpleNamespace(output_dims=DIMS)
    )
    values = {b"new": {"looks": [0.5] * DIMS}}

    items = NewItemTower(NewItemInputs((LOOKS_INPUT,)), tower).compute_new_items(table, [NewItem(b"new", 1)], values)

    assert not len(items) and items.left_out_ids == {b"new"}
