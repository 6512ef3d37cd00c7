"""Features in the demo: towers that take features in addition to a history, and requests with features alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from cache.model.ranking import unit
from cache.model.tower_spec import InputSpec, TowerSpec
from infra.demo.checks import Judge, Question
from infra.demo.evaluate import answer_to_json
from infra.demo.synthetic import Features, Profiles
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.bundle_store import swap_in
from precompute.bundles.onnx_model import IR_VERSION, OPSET, OnnxModel, read_model
from serving.client import Answer, Client, Entity, Options, Policy
from serving.requests.answers import Source

ITEMS_SHOWN = 2
DEADLINE_MS = 5_000
NEW_ENTITIES = ("new user", "new item")
RIDGE = 1.0

FITTED_USERS = 4_000
"""Users in the regression: enough for two coefficients per country."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Coefficients [labels + 1, dims] of one regression; the last row is for unseen labels.

    An item that the reference model was trained on keeps its vector, and a user with a history theirs. For all others,
    a vector is predicted from a label and a number: v = base[label] + slope[label] * z(log(number)), fitted by ridge
    regression onto the reference model's own vectors. An unseen label gets the mean of all.
    """

    labels: tuple[str, ...]
    base: NDArray[np.float32]
    slope: NDArray[np.float32]
    bounds: tuple[float, float]
    mean: float
    deviation: float

    def nodes(self, label: str, number: str) -> list[NodeProto]:
        """Return the nodes from two inputs to `featured` [rows, dims]; add `constants` to the graph."""
        label_encoding = {"keys_strings": self.labels, "values_int64s": range(len(self.labels))}
        return [
            _look_up(label, "place", **label_encoding, default_int64=len(self.labels)),
            helper.make_node("Gather", ["base", "place"], ["start"]),
            helper.make_node("Gather", ["slope", "place"], ["steep"]),
            helper.make_node("Clip", [number, "low", "high"], ["within"]),
            helper.make_node("Log", ["within"], ["logged"]),
            helper.make_node("Sub", ["logged", "mean"], ["centred"]),
            helper.make_node("Div", ["centred", "deviation"], ["scaled"]),
            helper.make_node("Unsqueeze", ["scaled", "axes"], ["tall"]),
            helper.make_node("Mul", ["steep", "tall"], ["added"]),
            helper.make_node("Add", ["start", "added"], ["featured"]),
        ]

    @property
    def constants(self) -> dict[str, NDArray[Any]]:
        """Initializers of `nodes`."""
        low, high = self.bounds
        numbers = {"low": low, "high": high, "mean": self.mean, "deviation": self.deviation}
        return {
            "base": self.base,
            "slope": self.slope,
            "axes": np.array([1], np.int64),
            **{name: np.array(value, np.float32) for name, value in numbers.items()},
        }


def fit_ridge(
    labels: Sequence[str], numbers: NDArray[np.float64], vectors: NDArray[np.float32]
) -> Fit:
    """Fit a ridge regression of vectors [n, dims] on a label and a positive number each."""
    names, label_indices = np.unique(np.array(labels), return_inverse=True)
    logged = np.log(numbers)
    mean, deviation = float(logged.mean()), max(float(logged.std()), 1e-6)
    one_hot = np.eye(len(names))[label_indices]
    design = np.hstack([one_hot, one_hot * ((logged - mean) / deviation)[:, None]])
    average = vectors.mean(axis=0)
    square = design.T @ design + RIDGE * np.eye(design.shape[1])
    coefficients = np.linalg.solve(square, design.T @ (vectors - average))
    base, slope = np.split(coefficients, 2)
    return Fit(
        tuple(map(str, names)),
        np.vstack([average + base, average]).astype(np.float32),
        np.vstack([slope, np.zeros_like(average)]).astype(np.float32),
        (float(numbers.min()), float(numbers.max())),
        mean,
        deviation,
    )


def add_features(
    folder: Path, histories: Mapping[str, Sequence[str]], profiles: Profiles
) -> Bundle:
    """Replace the reference bundle in `folder` by one whose towers take features too.

    `histories` are those of its training, of items that it knows.
    """
    reference = Bundle.read(folder)
    table, centroids = (
        _read_constant(reference.values["user_affinity"].path, name)
        for name in ("table", "centroids")
    )
    vectors = _read_constant(reference.item_tower.path, "table")
    ids = [raw.decode() for raw in reference.item_ids]
    prices = np.array([float(profiles.items[item_id]["price"]) for item_id in ids])
    of_items = fit_ridge(
        [str(profiles.items[item_id]["category"]) for item_id in ids], prices, vectors
    )
    of_users = _fit_users(table, ids, histories, profiles.users)
    staging_folder = folder.with_name(f"{folder.name}-with-features")
    write_bundle(
        staging_folder,
        name="reference-with-features",
        version=reference.version,
        dims=reference.dims,
        item_ids=ids,
        user_tower=_user_model(reference, of_users, table, None),
        item_tower=_item_model(ids, of_items, vectors),
        values={"user_affinity": _user_model(reference, of_users, table, centroids)},
        training={**reference.training, "features": "ridge regression", "ridge": RIDGE},
    )
    swap_in(staging_folder, folder)
    return Bundle.read(folder)


def _fit_users(
    table: NDArray[np.float32],
    ids: Sequence[str],
    histories: Mapping[str, Sequence[str]],
    users: Mapping[str, Features],
) -> Fit:
    row = {item: number for number, item in enumerate(ids)}
    sampled_users = list(histories)[:: max(1, len(histories) // FITTED_USERS)]
    sums = np.stack(
        [table[[row[item] for item in histories[user]]].sum(axis=0) for user in sampled_users]
    )
    # Directions alone: a long history must not count for more.
    directions = unit(sums) * np.float32(np.linalg.norm(sums, axis=1).mean())
    return fit_ridge(
        [str(users[user_id]["country"]) for user_id in sampled_users],
        np.array([float(users[user_id]["age"]) for user_id in sampled_users]),
        directions,
    )


def _item_model(ids: Sequence[str], side: Fit, vectors: NDArray[np.float32]) -> ModelFile:
    """Build item, category, price -> vector: the item's row of the table if it has one, else from the features."""
    dims = vectors.shape[1]
    nodes = [
        *side.nodes("category", "price"),
        _look_up("item", "row", keys_strings=ids, values_int64s=range(len(ids)), default_int64=len(ids)),
        helper.make_node("Gather", ["table", "row"], ["trained"]),
        helper.make_node("Less", ["row", "items"], ["known"]),
        helper.make_node("Unsqueeze", ["known", "axes"], ["is_known"]),
        helper.make_node("Where", ["is_known", "trained", "featured"], ["vector"]),
    ]  # fmt: skip
    constants = {
        **side.constants,
        "table": np.vstack([vectors, np.zeros((1, dims), np.float32)]),
        "items": np.array(len(ids), np.int64),
    }
    inputs = (
        InputSpec("item", "feature", "string", column="item"),
        InputSpec("category", "feature", "string", column="category"),
        InputSpec("price", "feature", "float32", column="price"),
    )
    spec = TowerSpec(inputs, "vector", dims)
    return ModelFile(_model(nodes, spec, constants), spec, entity="item")


def _user_model(
    reference: Bundle, side: Fit, table: NDArray[np.float32], centroids: NDArray[np.float32] | None
) -> ModelFile:
    """Build history, country, age -> vector, from the history unless it is empty; with `centroids`, affinities."""
    affinity = reference.values["user_affinity"]
    nodes = [
        *side.nodes("country", "age"),
        helper.make_node("Gather", ["table", "history"], ["gathered"]),
        helper.make_node("ReduceSum", ["gathered", "axes"], ["summed"], keepdims=0),
        # The padding is the largest index, so a history of nothing else has no smaller one.
        helper.make_node("ReduceMin", ["history", "axes"], ["smallest"], keepdims=1),
        helper.make_node("Less", ["smallest", "pad"], ["has_history"]),
        helper.make_node("Where", ["has_history", "summed", "featured"], ["vector"]),
    ]
    constants: dict[str, NDArray[Any]] = {
        **side.constants,
        "table": table,
        "pad": np.array(len(table) - 1, np.int32),
    }
    spec = reference.user_tower.spec
    labels: tuple[str, ...] = ()
    if centroids is not None:
        spec, labels = affinity.spec, affinity.labels
        nodes += [
            helper.make_node("LpNormalization", ["vector"], ["direction"], axis=1, p=2),
            helper.make_node("MatMul", ["direction", "centroids"], ["logits"], name="logits"),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
        ]
        constants["centroids"] = centroids
    inputs = (
        *spec.inputs,
        InputSpec("country", "feature", "string", column="country"),
        InputSpec("age", "feature", "float32", column="age"),
    )
    spec = TowerSpec(inputs, spec.output, spec.output_dims)
    return ModelFile(_model(nodes, spec, constants), spec, labels=labels)


def _look_up(name: str, output_name: str, **attributes: object) -> NodeProto:
    return helper.make_node(
        "LabelEncoder", [name], [output_name], domain="ai.onnx.ml", **attributes
    )


def _model(
    nodes: Sequence[NodeProto], spec: TowerSpec, constants: Mapping[str, NDArray[Any]]
) -> OnnxModel:
    output = helper.make_tensor_value_info(
        spec.output, TensorProto.FLOAT, ["rows", spec.output_dims]
    )
    graph = helper.make_graph(
        nodes,
        "tower",
        [_model_input(input_spec) for input_spec in spec.inputs],
        [output],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="larder"
    )
    return OnnxModel.of(model, constants)


def _model_input(spec: InputSpec) -> ValueInfoProto:
    kinds = {"string": TensorProto.STRING, "float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    shape = ["rows", "length"] if spec.bind == "history" else ["rows"]
    return helper.make_tensor_value_info(spec.name, kinds[spec.dtype], shape)


def _read_constant(model: Path, name: str) -> NDArray[np.float32]:
    initializers = read_model(model).graph.initializer
    return np.array(
        numpy_helper.to_array(
            next(initializer for initializer in initializers if initializer.name == name)
        )
    )


class ColdStart(NamedTuple):
    """Row of the table of cold-start answers."""

    entity_kind: str
    table: str
    source: str
    producer: str
    answer: str


def ask_cold(
    url: str,
    profiles: Profiles,
    histories: Mapping[str, Sequence[str]],
    judge: Judge,
) -> list[ColdStart]:
    """Request answers for a user with a history, for a user and an item without a click, and for two unknown ids.

    `judge` sees them as they came. Raises Unanswered, and ValueError if an unknown id was not answered live.
    """
    new_user, new_item = profiles.new_user, profiles.new_item
    known_user = next(iter(histories))
    quiet_user = next(user for user in profiles.users if user not in histories)
    entity_by_kind_and_table = {
        ("known user", "user_topk"): Entity(known_user),
        ("known user", "user_affinity"): Entity(known_user),
        ("quiet user", "user_topk"): Entity(quiet_user, features=profiles.users[quiet_user]),
        ("unseen item", "item_similar"): Entity(profiles.unseen[0]),
        ("new item", "item_similar"): Entity(str(new_item["item"]), features=new_item),
        ("new user", "user_topk"): Entity("new-user", features=new_user),
        ("new user", "user_affinity"): Entity("new-user", features=new_user),
    }
    entities = [
        Entity(entity.id, features=entity.features, table=table)
        for (_, table), entity in entity_by_kind_and_table.items()
    ]
    # Sent once, so that what the service counted is what was asked.
    with Client(url, policy=Policy(attempts=1)) as larder:
        options = Options(k=ITEMS_SHOWN, deadline_ms=DEADLINE_MS)
        answers = larder.lookup_tables(entities, options)
    questions = [Question(str(entity.table), str(entity.id), ITEMS_SHOWN) for entity in entities]
    judge.request(questions, [answer_to_json(lookup_answer) for lookup_answer in answers])
    for (entity_kind, table), answer in zip(entity_by_kind_and_table, answers, strict=True):
        if entity_kind in NEW_ENTITIES and answer.source != Source.LIVE:
            raise ValueError(f"{entity_kind}, {table}: {answer.source} ({answer.reason}), not live")
    return [
        ColdStart(
            entity_kind,
            table,
            answer.source,
            str(answer.producer),
            _describe_answer(answer, profiles),
        )
        for (entity_kind, table), answer in zip(entity_by_kind_and_table, answers, strict=True)
    ]


def describe_features(features: Mapping[str, Any]) -> str:
    """Return features in a few words."""
    return ", ".join(f"{name} {value}" for name, value in features.items())


def _describe_answer(answer: Answer, profiles: Profiles) -> str:
    if answer.items is not None:
        kinds = [str(profiles.items[item]["category"]) for item in answer.items]
        return ", ".join(kinds)
    values, labels = answer.values, answer.labels
    if values is None or labels is None:
        return "nothing"
    top_position = max(range(len(labels)), key=lambda position: float(values[position]))
    return f"{labels[top_position]} {values[top_position]:.2f}"
