"""Features in the demo: towers that take a feature in addition to a history, and requests with features alone."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.parser import parse_model

from cache.model.tower_spec import InputSpec, TowerSpec
from infra.demo.checks import POLICY, InvariantViolation, Judge, Question
from infra.demo.dataset import Lists
from infra.demo.synthetic import Profiles
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.onnx_model import IR_VERSION, OPSET_VERSION, OnnxModel, read_model
from serving.client import Client, Options
from serving.requests.answers import Source

Constants = dict[str, NDArray[Any]]

FEATURES = ("country", "item", "category")
NEW_USER, NEW_ITEM = {"country": "SE"}, {"item": "new-item", "category": "books"}

# A user's vector is the sum of the history's, or that of the country if all is padding, which is the largest index.
USER_NODES = """
featured = Gather (means, code)
gathered = Gather (table, history)
summed = ReduceSum <keepdims = 0> (gathered, axes)
smallest = ReduceMin <keepdims = 1> (history, axes)
has_history = Less (smallest, pad)
vector = Where (has_history, summed, featured)
"""
# An item's vector is its row of the table, or that of the category if it has none.
ITEM_NODES = """
featured = Gather (means, code)
trained = Gather (table, row)
is_trained = Less (row, count)
is_trained_row = Unsqueeze (is_trained, axes)
vector = Where (is_trained_row, trained, featured)
"""


def add_features(folder: Path, histories: Lists, profiles: Profiles) -> None:
    """Replace the reference bundle in `folder` by one whose towers take features too.

    An item that the reference model was trained on keeps its vector, and a user with a history theirs; all others get
    the mean vector of their category or country. `histories` are those of the training, of items that it knows.
    """
    reference = Bundle.read(folder)
    tastes, dims = reference.values["user_affinity"], reference.dims
    table = _constant(reference.user_tower.path, "table")
    vectors = _constant(reference.item_tower.path, "table")
    ids = [raw.decode() for raw in reference.item_ids]
    rows = {item: row for row, item in enumerate(ids)}
    sums = [table[[rows[item] for item in items]].sum(axis=0) for items in histories.values()]
    lived_in = [profiles.users[user]["country"] for user in histories]
    countries, country_means = label_means(lived_in, np.stack(sums))
    sorts = [profiles.items[item]["category"] for item in ids]
    categories, category_means = label_means(sorts, vectors)
    axes, count = np.array([1], np.int64), np.array(len(ids), np.int64)
    padded = np.pad(vectors, ((0, 1), (0, 0)))
    of_users: Constants = {"axes": axes, "means": country_means, "table": table}
    of_users["pad"] = count.astype(np.int32)
    of_items: Constants = {"axes": axes, "means": category_means, "table": padded, "count": count}
    user_nodes = _encoder("code", "country", countries) + USER_NODES
    item_code = _encoder("code", "category", categories)
    item_nodes = item_code + _encoder("row", "item", ids) + ITEM_NODES
    country, *of_item = [InputSpec(name, "feature", "string", name) for name in FEATURES]
    user = TowerSpec((*reference.user_tower.spec.inputs, country), "vector", dims)
    item = TowerSpec(tuple(of_item), "vector", dims)
    taste_model = OnnxModel(tastes.path.read_bytes())
    shutil.rmtree(folder)
    write_bundle(
        folder,
        name="reference-with-features",
        version=reference.version,
        dims=dims,
        item_ids=ids,
        user_tower=ModelFile(_model(user_nodes, user, of_users), user),
        item_tower=ModelFile(_model(item_nodes, item, of_items), item, entity="item"),
        values={"user_affinity": ModelFile(taste_model, tastes.spec, labels=tastes.labels)},
        training=reference.training,
    )


def label_means(
    labels: Sequence[str], vectors: NDArray[np.float32]
) -> tuple[list[str], NDArray[np.float32]]:
    """Return the distinct labels, and the mean vector [labels + 1, dims] of each; the last is the mean of all."""
    names, codes = np.unique(np.array(labels), return_inverse=True)
    means = [vectors[codes == code].mean(axis=0) for code in range(len(names))]
    return names.tolist(), np.stack([*means, vectors.mean(axis=0)])


def _encoder(output: str, source: str, labels: Sequence[str]) -> str:
    """Return a node that numbers labels; an unknown one gets the number after the last."""
    keys, numbers = json.dumps(labels, ensure_ascii=False), list(range(len(labels)))
    attributes = f"keys_strings = {keys}, values_int64s = {numbers}, default_int64 = {len(labels)}"
    return f"{output} = ai.onnx.ml.LabelEncoder <{attributes}> ({source})\n"


def _model(nodes: str, spec: TowerSpec, constants: Constants) -> OnnxModel:
    kinds = {"history": "int32[rows, length]", "feature": "string[rows]"}
    inputs = ", ".join(f"{kinds[source.bind]} {source.name}" for source in spec.inputs)
    versions = f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET_VERSION}, "ai.onnx.ml" : 2]>'
    output = f"float[rows, {spec.output_dims}] {spec.output}"
    model = parse_model(f"{versions} tower ({inputs}) => ({output}) {{ {nodes} }}")
    return OnnxModel.of(model, constants)


def _constant(model: Path, name: str) -> NDArray[np.float32]:
    tensors = {tensor.name: tensor for tensor in read_model(model).graph.initializer}
    return np.array(numpy_helper.to_array(tensors[name]))


def ask_cold(url: str, profiles: Profiles, histories: Lists, judge: Judge) -> list[str]:
    """Ask for a user and an item without a click, and for new ones that no table has; return a line for each.

    Raises Unanswered, and InvariantViolation if a new one was not answered live.
    """
    quiet_user = next(user for user in profiles.users if user not in histories)
    questions = [
        Question("user_topk", quiet_user, 2, features=profiles.users[quiet_user]),
        Question("item_similar", list(profiles.items)[-1], 2),
        Question("user_topk", "new-user", 2, features=NEW_USER),
        Question("user_affinity", "new-user", 2, history=next(iter(histories.values()))),
        Question("item_similar", NEW_ITEM["item"], 2, features=NEW_ITEM),
    ]
    with Client(url, policy=POLICY) as larder:
        answers = larder.lookup_tables([asked.entity for asked in questions], Options(k=2))
    judge.request(questions, answers)
    for answer in answers:
        if str(answer.id).startswith("new-") and answer.source != Source.LIVE:
            raise InvariantViolation(f"{answer.id}: {answer.source} ({answer.reason}), not live")
    return [f"{answer.table} of {answer.id}: {answer.source}" for answer in answers]
