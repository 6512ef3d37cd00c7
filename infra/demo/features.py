"""Features in the demo: towers that take a feature besides the history, and requests with features only."""

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
from infra.demo.dataset import ItemsByUser
from infra.demo.synthetic import Profiles
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.onnx_model import IR_VERSION, OPSET_VERSION, OnnxModel, read_model
from serving.client import Client, Options
from serving.requests.answers import Source

ConstantByName = dict[str, NDArray[Any]]

FEATURE_NAMES = ("country", "item", "category")
NEW_USER, NEW_ITEM = {"country": "SE"}, {"item": "new-item", "category": "books"}

# A user's vector is the sum over the history, or the country's vector if all indices are padding (the largest index).
USER_NODES_TEXT = """
featured = Gather (means, code)
gathered = Gather (table, history)
summed = ReduceSum <keepdims = 0> (gathered, axes)
smallest = ReduceMin <keepdims = 1> (history, axes)
has_history = Less (smallest, pad)
vector = Where (has_history, summed, featured)
"""
# An item's vector is its row of the table, or the category's vector if the item has no row.
ITEM_NODES_TEXT = """
featured = Gather (means, code)
trained = Gather (table, row)
is_trained = Less (row, count)
is_trained_row = Unsqueeze (is_trained, axes)
vector = Where (is_trained_row, trained, featured)
"""


def add_features(bundle_folder: Path, histories: ItemsByUser, profiles: Profiles) -> None:
    """Replace the reference bundle in `bundle_folder` by a bundle whose towers also take features.

    Items of the training and users with a history keep their vectors; all others get the mean vector of their category
    or country. `histories` are those of the training; all their items are in the bundle.
    """
    reference = Bundle.read(bundle_folder)
    affinity_model, dims = reference.value_models["user_affinity"], reference.dims
    user_table = _read_constant(reference.user_tower.path, "table")
    item_vectors = _read_constant(reference.item_tower.path, "table")
    item_ids = [raw.decode() for raw in reference.item_ids]
    row_by_item = {item: row for row, item in enumerate(item_ids)}
    history_sums = [user_table[[row_by_item[item] for item in items]].sum(axis=0) for items in histories.values()]
    user_countries = [profiles.users[user]["country"] for user in histories]
    countries, country_means = label_means(user_countries, np.stack(history_sums))
    item_categories = [profiles.items[item]["category"] for item in item_ids]
    categories, category_means = label_means(item_categories, item_vectors)
    axes, item_count = np.array([1], np.int64), np.array(len(item_ids), np.int64)
    padded_item_vectors = np.pad(item_vectors, ((0, 1), (0, 0)))
    user_constants: ConstantByName = {"axes": axes, "means": country_means, "table": user_table}
    user_constants["pad"] = item_count.astype(np.int32)
    item_constants: ConstantByName = {"axes": axes, "means": category_means, "table": padded_item_vectors}
    item_constants["count"] = item_count
    user_nodes = _label_encoder_node("code", "country", countries) + USER_NODES_TEXT
    item_code = _label_encoder_node("code", "category", categories)
    item_nodes = item_code + _label_encoder_node("row", "item", item_ids) + ITEM_NODES_TEXT
    country_input, *item_inputs = [InputSpec(name, "feature", "string", name) for name in FEATURE_NAMES]
    user_spec = TowerSpec((*reference.user_tower.spec.inputs, country_input), "vector", dims)
    item_spec = TowerSpec(tuple(item_inputs), "vector", dims)
    taste_model = OnnxModel(affinity_model.path.read_bytes())
    shutil.rmtree(bundle_folder)
    write_bundle(
        bundle_folder,
        name="reference-with-features",
        version=reference.version,
        dims=dims,
        item_ids=item_ids,
        user_tower=ModelFile(_build_model(user_nodes, user_spec, user_constants), user_spec),
        item_tower=ModelFile(_build_model(item_nodes, item_spec, item_constants), item_spec, entity="item"),
        values={"user_affinity": ModelFile(taste_model, affinity_model.spec, labels=affinity_model.labels)},
        training=reference.training,
    )


def label_means(category_labels: Sequence[str], vectors: NDArray[np.float32]) -> tuple[list[str], NDArray[np.float32]]:
    """Return the distinct labels, and mean vectors [labels + 1, dims]: one per label, then the mean of all vectors."""
    distinct_labels, codes = np.unique(np.array(category_labels), return_inverse=True)
    means = [vectors[codes == code].mean(axis=0) for code in range(len(distinct_labels))]
    return distinct_labels.tolist(), np.stack([*means, vectors.mean(axis=0)])


def _label_encoder_node(output_name: str, input_name: str, category_labels: Sequence[str]) -> str:
    """Return the text of a node that maps labels to numbers from 0; unknown labels get len(labels)."""
    labels_json, numbers = json.dumps(category_labels, ensure_ascii=False), list(range(len(category_labels)))
    attributes = f"keys_strings = {labels_json}, values_int64s = {numbers}, default_int64 = {len(category_labels)}"
    return f"{output_name} = ai.onnx.ml.LabelEncoder <{attributes}> ({input_name})\n"


def _build_model(nodes_text: str, spec: TowerSpec, constants: ConstantByName) -> OnnxModel:
    type_by_bind = {"history": "int32[rows, length]", "feature": "string[rows]"}
    inputs = ", ".join(f"{type_by_bind[source.bind]} {source.name}" for source in spec.inputs)
    versions = f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET_VERSION}, "ai.onnx.ml" : 2]>'
    output = f"float[rows, {spec.output_dims}] {spec.output}"
    model = parse_model(f"{versions} tower ({inputs}) => ({output}) {{ {nodes_text} }}")
    return OnnxModel.of(model, constants)


def _read_constant(model_path: Path, tensor_name: str) -> NDArray[np.float32]:
    tensors = {tensor.name: tensor for tensor in read_model(model_path).graph.initializer}
    return np.array(numpy_helper.to_array(tensors[tensor_name]))


def ask_cold_entities(service_url: str, profiles: Profiles, histories: ItemsByUser, judge: Judge) -> list[str]:
    """Look up a user and an item without clicks, and entities that no table has; return one line per answer.

    Raises Unanswered, or InvariantViolation if an entity that no table has was not answered live.
    """
    quiet_user = next(user for user in profiles.users if user not in histories)
    questions = [
        Question("user_topk", quiet_user, 2, value_by_feature=profiles.users[quiet_user]),
        Question("item_similar", list(profiles.items)[-1], 2),
        Question("user_topk", "new-user", 2, value_by_feature=NEW_USER),
        Question("user_affinity", "new-user", 2, history_items=next(iter(histories.values()))),
        Question("item_similar", NEW_ITEM["item"], 2, value_by_feature=NEW_ITEM),
    ]
    with Client(service_url, policy=POLICY) as larder:
        answers = larder.lookup_tables([asked.entity for asked in questions], Options(k=2))
    judge.request(questions, answers)
    for answer in answers:
        if str(answer.id).startswith("new-") and answer.source != Source.LIVE:
            raise InvariantViolation(f"{answer.id}: {answer.source} ({answer.reason}), not live")
    return [f"{answer.table} of {answer.id}: {answer.source}" for answer in answers]
