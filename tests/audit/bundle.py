"""A model made for the audit: towers in ONNX, and the same arithmetic in Python."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

from tests.audit.values import Json, Vector
from tests.audit.world import COUNTRIES, DIMS, LIFT_DIRECTION

MAX_LENGTH = 64
LABELS = ("food", "travel", "books")


@dataclass(frozen=True)
class Model:
    """A user tower that depends on the order of a history, an item tower of features, and a table of values.

    The user's vector is the sum of E[h], plus that of A[h_t] * F[h_t+1] over neighbours, plus C[country].
    """

    vocabulary: dict[str, int]
    embeddings: np.ndarray
    successors: np.ndarray
    countries: np.ndarray
    moods: np.ndarray
    max_length: int = MAX_LENGTH

    def user_vector(self, history: list[str], country: int) -> Vector:
        """Return the user tower's output for a history whose oldest item comes first."""
        item_indexes = [self.vocabulary[item] for item in history if item in self.vocabulary]
        item_indexes = item_indexes[-self.max_length :]
        total = self.countries[country].copy()
        for index in item_indexes:
            total += self.embeddings[index]
        for earlier, later in itertools.pairwise(item_indexes):
            total += self.embeddings[earlier] * self.successors[later]
        return tuple(float(part) for part in total)

    def mood(self, country: int) -> Vector:
        """Return the values of a user from that country."""
        return tuple(float(part) for part in self.moods[country])


def make_model(seed: int, vocabulary: tuple[str, ...], max_length: int = MAX_LENGTH) -> Model:
    """Draw a model; all its numbers are multiples of an eighth."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, width: int, largest: int) -> np.ndarray:
        return rng.integers(-largest, largest + 1, (rows, width)).astype(np.float64) / 8

    countries = draw(COUNTRIES, DIMS, 8)
    countries[0] = 0.0  # a vector of zeros makes all scores equal: it shows the catalogue's order
    return Model(
        {id_: index for index, id_ in enumerate(vocabulary)},
        draw(len(vocabulary), DIMS, 8),
        draw(len(vocabulary), DIMS, 4),
        countries,
        draw(COUNTRIES, len(LABELS), 16),
        max_length,
    )


def write_bundle(model: Model, folder: Path, version: str = "1") -> None:
    """Write the folder that docs/how-to/bring-your-own-model.md describes."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = sorted(model.vocabulary, key=lambda id_: model.vocabulary[id_])
    pq.write_table(pa.table({"id": pa.array(ids, pa.string())}), folder / "items.parquet")
    pad = len(ids)
    user_inputs: list[Json] = [
        {"name": "history", "bind": "history", "dtype": "int32", "max_length": model.max_length, "pad": pad},
        {"name": "country", "bind": "feature", "column": "country", "dtype": "int64"},
    ]
    item_inputs: list[Json] = [
        {"name": "looks", "bind": "feature", "column": "looks", "dtype": "float32", "width": DIMS},
        {"name": "lift", "bind": "feature", "column": "lift", "dtype": "float32"},
    ]
    mood_inputs: list[Json] = [{"name": "country", "bind": "feature", "column": "country", "dtype": "int64"}]
    towers = {
        "user_tower": (_user_graph(model), "vector", DIMS, user_inputs),
        "item_tower": (_item_graph(), "vector", DIMS, item_inputs),
        "mood": (_mood_graph(model), "values", len(LABELS), mood_inputs),
    }
    written: dict[str, Json] = {}
    for name, (graph, output, width, inputs) in towers.items():
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        proto.ir_version = 8
        onnx.checker.check_model(proto)
        path = folder / f"{name}.onnx"
        path.write_bytes(proto.SerializeToString())
        written[name] = {
            "path": path.name,
            "sha256": _digest(path),
            "output": output,
            "output_dims": width,
            "inputs": inputs,
        }
    document: Json = {
        "format": 1,
        "name": "audit",
        "version": version,
        "dims": DIMS,
        "metric": "inner_product",
        "items": {"path": "items.parquet", "count": len(ids), "sha256": _digest(folder / "items.parquet")},
        "user_tower": written["user_tower"],
        "item_tower": written["item_tower"],
        "values": {"mood": {"entity": "user", "labels": list(LABELS), **written["mood"]}},
    }
    (folder / "bundle.json").write_text(json.dumps(document))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _table(name: str, numbers: np.ndarray, padded: bool) -> onnx.TensorProto:
    if padded:
        numbers = np.concatenate([numbers, np.zeros((1, numbers.shape[1]))])
    return numpy_helper.from_array(numbers.astype(np.float32), name)


def _integers(name: str, *numbers: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def _user_graph(model: Model) -> onnx.GraphProto:
    node = helper.make_node
    nodes = [
        node("Gather", ["E", "history"], ["embedded"]),
        node("ReduceSum", ["embedded", "one"], ["sum"], keepdims=0),
        node("Slice", ["embedded", "zero", "minus_one", "one"], ["earlier"]),
        node("Gather", ["F", "history"], ["successors"]),
        node("Slice", ["successors", "one", "end", "one"], ["later"]),
        node("Mul", ["earlier", "later"], ["products"]),
        node("ReduceSum", ["products", "one"], ["pairs"], keepdims=0),
        node("Gather", ["C", "country"], ["home"]),
        node("Add", ["sum", "pairs"], ["both"]),
        node("Add", ["both", "home"], ["vector"]),
    ]
    return helper.make_graph(
        nodes,
        "user",
        [
            helper.make_tensor_value_info("history", TensorProto.INT32, ["rows", "length"]),
            helper.make_tensor_value_info("country", TensorProto.INT64, ["rows"]),
        ],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["rows", DIMS])],
        [
            _table("E", model.embeddings, padded=True),
            _table("F", model.successors, padded=True),
            _table("C", model.countries, padded=False),
            _integers("zero", 0),
            _integers("one", 1),
            _integers("minus_one", -1),
            _integers("end", 2**31),
        ],
    )


def _item_graph() -> onnx.GraphProto:
    node = helper.make_node
    return helper.make_graph(
        [
            node("Unsqueeze", ["lift", "one"], ["column"]),
            node("Mul", ["column", "direction"], ["moved"]),
            node("Add", ["looks", "moved"], ["vector"]),
        ],
        "item",
        [
            helper.make_tensor_value_info("looks", TensorProto.FLOAT, ["rows", DIMS]),
            helper.make_tensor_value_info("lift", TensorProto.FLOAT, ["rows"]),
        ],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["rows", DIMS])],
        [_integers("one", 1), numpy_helper.from_array(np.array([LIFT_DIRECTION], np.float32), "direction")],
    )


def _mood_graph(model: Model) -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node("Gather", ["M", "country"], ["values"])],
        "mood",
        [helper.make_tensor_value_info("country", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, ["rows", len(LABELS)])],
        [_table("M", model.moods, padded=False)],
    )
