"""A night whose user tower takes other features than its base's publishes its own."""

import numpy as np
from onnx import TensorProto, helper

from cache.model.tower_spec import TowerSpec
from precompute.bundles.bundle import ModelFile
from tests.integration.changed.month import Month, scored
from tests.integration.feature_towers import COUNTRY, DIMS, MOOD, MOODS, from_mood, from_scent, model, with_towers


def from_mood_and_country(_items: int) -> ModelFile:
    """User tower without a history: the mood, again and again."""
    repeat_node = helper.make_node("Concat", ["mood"] * (DIMS // len(MOODS)), ["moods"], axis=1)
    nodes = [
        helper.make_node("Cast", ["country"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["number", "axes"], ["home"]),
        repeat_node,
        helper.make_node("Add", ["moods", "home"], ["vector"]),
    ]
    inputs: list[tuple[str, int, list[str | int]]] = [
        ("mood", TensorProto.FLOAT, ["n", len(MOODS)]), ("country", TensorProto.INT64, ["n"]),
    ]  # fmt: skip
    axes = {"axes": np.array([1], np.int64)}
    return ModelFile(model(nodes, axes, inputs), TowerSpec((MOOD, COUNTRY), "vector", DIMS))


def test_features_of_another_user_tower_are_not_copied(featured: Month) -> None:
    # given: values are the only user table, and their model does not change
    month = featured
    tables = {
        name: table_config for name,
        table_config in month.config.tables.items() if name not in ("user_topk", "user_vector")
    }  # fmt: skip
    month.configure(tables=tables)
    month.publish()
    models = {"mood": from_mood(), "worth": from_scent()}
    with_towers(month.config, from_mood_and_country, models)

    month.night = 1
    generation = month.publish()

    assert month.differences(generation, scored(month.full, month.cut)) == []
