"""Nights of any number of users, items and features, drawn: for what a step costs, not how good it is."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper

from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.builds.tables import layout_of
from precompute.bundles import onnx_model
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.onnx_model import OnnxModel
from precompute.config.settings import NightConfig, Sources, TableConfig
from precompute.planning.sizes import NightShape

DIMS, HISTORY, K = 64, 20, 20
CASE = "case.json"


@dataclass(frozen=True, slots=True)
class Case:
    """How large the night is; `width` numbers of features for each user."""

    users: int
    items: int
    width: int
    shards: int = 1


def write_case(folder: Path, case: Case) -> None:
    """Sources and a bundle whose user tower adds a projection of the features to the sum of the history's rows."""
    folder.mkdir()
    (folder / CASE).write_text(json.dumps(asdict(case)))
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((case.items, DIMS), np.float32) / np.sqrt(1 + np.arange(DIMS, dtype="f4"))
    names = [f"item-{number}" for number in range(case.items)]
    history = InputSpec("history", "history", "int32", max_length=64, pad=case.items)
    taste = InputSpec("taste", "feature", "float32", column="taste", width=case.width)
    write_bundle(
        folder / "bundle", name="wide", version="1", dims=DIMS, item_ids=names,
        user_tower=ModelFile(
            _user_tower(rows, rng.standard_normal((case.width, DIMS), np.float32) / 100),
            TowerSpec((history, taste), "vector", DIMS),
        ),
        item_tower=ModelFile(
            onnx_model.item_tower(rows),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", DIMS),
            entity="item",
        ),
    )  # fmt: skip
    owners = np.repeat(np.arange(case.users), HISTORY)
    item_indexes = rng.integers(0, case.items, len(owners))
    table = {
        "user": pa.array(owners).cast(pa.string()),
        "item": pa.array(names).take(pa.array(item_indexes)),
        "timestamp": np.arange(len(owners)) + 1_700_000_000,
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    _write_users(folder / "users.parquet", case)


def _write_users(path: Path, case: Case) -> None:
    kind = pa.list_(pa.float32())
    schema = pa.schema([("user", pa.string()), ("taste", kind)])
    rng, step = np.random.default_rng(1), max(1, (16 << 20) // (4 * case.width))
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for start in range(0, case.users, step):
            users = np.arange(start, min(start + step, case.users))
            numbers = rng.standard_normal(len(users) * case.width, np.float32)
            ends = np.arange(len(users) + 1, dtype=np.int32) * case.width
            wide = pa.ListArray.from_arrays(pa.array(ends), pa.array(numbers))
            writer.write_table(pa.table([pa.array(users).cast(pa.string()), wide], schema=schema))


def _user_tower(rows: np.ndarray, projection: np.ndarray) -> OnnxModel:
    padded = np.concatenate([rows, np.zeros((1, DIMS), np.float32)])
    nodes = [
        *onnx_model._sum_of_rows("summed"),
        helper.make_node("MatMul", ["taste", "projection"], ["turned"], name="turned"),
        helper.make_node("Add", ["summed", "turned"], ["vector"], name="vector"),
    ]
    taste = helper.make_tensor_value_info("taste", TensorProto.FLOAT, ["rows", len(projection)])
    inputs = [onnx_model.int32_info("history", ["rows", "length"]), taste]
    constants = {"table": padded, "axes": np.array([1], np.int64), "projection": projection}
    return onnx_model.build_onnx_model(nodes, inputs, [onnx_model.float32_info("vector", DIMS)], constants)


def config_of(folder: Path, redis_url: str) -> NightConfig:
    """The night over what `write_case` left."""
    case = Case(**json.loads((folder / CASE).read_text()))
    return NightConfig(
        namespace=folder.name,
        artifacts=str(folder / "artifacts"),
        state=str(folder / "state"),
        bundle=str(folder / "bundle"),
        redis_url=redis_url,
        shards=case.shards,
        sources=Sources((str(folder / "interactions.parquet"),), user_features=str(folder / "users.parquet")),
        tables={"user_topk": TableConfig("user_topk", k=K)},
    )


def shape_of(folder: Path, config: NightConfig) -> NightShape:
    """The same for the forecast."""
    case, bundle = Case(**json.loads((folder / CASE).read_text())), Bundle.open(folder / "bundle")
    return NightShape(
        user_count=case.users, item_count=case.items, dims=DIMS, shard_count=case.shards, page_bytes=config.page_bytes,
        layout_by_table={"user_topk": ("user", layout_of(bundle, config.tables["user_topk"]))}, bytes_per_item_id=12,
        bytes_by_model={model.name: model.path.stat().st_size for model in bundle.models},
        model_item_count=case.items, model_dims=DIMS, metric_count=1,
        interaction_count=case.users * HISTORY, feature_bytes_per_user=4 * case.width,
    )  # fmt: skip
