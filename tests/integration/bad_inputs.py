"""Bad inputs of a night: a wrong bundle or source, and a generation computed correctly from it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from cache.model.tower import Histories, Inputs, Tower
from cache.store.artefacts import sha256_of
from precompute.bundles import onnx_model
from precompute.bundles.bundle import Bundle, BundleModel, ModelFile, write_bundle
from precompute.bundles.onnx_model import OnnxModel
from precompute.config.settings import NightConfig, ReferenceConfig
from precompute.reference.train import train_reference
from tests.integration.nights import DATA_UNTIL

Change = Callable[[NightConfig, Path], NightConfig]
"""(the night's configuration, an empty folder) -> the configuration of the night that goes wrong."""


def with_items_in_another_order(bundle: Path) -> None:
    table = pq.read_table(bundle / "items.parquet")
    order = np.random.default_rng(1).permutation(len(table))
    pq.write_table(table.take(pa.array(order)), bundle / "items.parquet")
    data = orjson.loads((bundle / "bundle.json").read_bytes())
    data["items"]["sha256"] = sha256_of(bundle / "items.parquet")
    (bundle / "bundle.json").write_bytes(orjson.dumps(data))


def bundle_vocabulary_shuffled(config: NightConfig, folder: Path) -> NightConfig:
    shutil.copytree(config.path(config.bundle), folder / "bundle")
    with_items_in_another_order(folder / "bundle")
    return replace(config, bundle=str(folder / "bundle"))


def retrained_and_shuffled(config: NightConfig, folder: Path) -> NightConfig:
    retrained_config = replace(
        config, bundle=str(folder / "bundle"), reference=ReferenceConfig(dims=16, seed=7, choose=False)
    )
    train_reference(retrained_config, data_until=DATA_UNTIL)
    with_items_in_another_order(folder / "bundle")
    return retrained_config


def with_vectors(
    config: NightConfig,
    folder: Path,
    make: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    rows: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda rows: rows,
) -> NightConfig:
    """Return the bundle with other item vectors and other history rows."""
    bundle = Bundle.open(config.path(config.bundle))
    items = len(bundle.item_ids)
    tower = bundle.item_tower
    vectors = _run(tower, {"item_index": np.arange(items)})
    history = bundle.user_tower
    table = _run(history, {"history": Histories.of([[item] for item in range(items)])})
    padded = np.concatenate([rows(table), np.zeros((1, bundle.dims), np.float32)])
    write_bundle(
        folder / "bundle",
        name="reference-spectral",
        version="2",
        dims=bundle.dims,
        item_ids=[raw.decode() for raw in bundle.item_ids],
        user_tower=ModelFile(onnx_model.history_tower(padded), history.spec),
        item_tower=ModelFile(onnx_model.item_tower(make(vectors)), tower.spec, entity="item"),
        values={
            name: ModelFile(OnnxModel(model.path.read_bytes()), model.spec, labels=model.labels)
            for name, model in bundle.value_models.items()
        },
    )
    return replace(config, bundle=str(folder / "bundle"))


def _run(model: BundleModel, inputs: Inputs) -> NDArray[np.float32]:
    return Tower.open(model.path, model.spec).run(inputs)


def untrained(config: NightConfig, folder: Path) -> NightConfig:
    rng = np.random.default_rng(2)
    return with_vectors(config, folder, lambda vectors: rng.standard_normal(vectors.shape).astype(np.float32))


def collapsed(config: NightConfig, folder: Path) -> NightConfig:
    """Return a bundle whose items all point one way, at other lengths: users get one list, less their history."""

    def make(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        collapsed_vectors: NDArray[np.float32] = (lengths * vectors[0]).astype(np.float32)
        return collapsed_vectors

    def rows(table: NDArray[np.float32]) -> NDArray[np.float32]:
        collapsed_rows: NDArray[np.float32] = np.abs(table @ table[:1].T) @ table[:1] + table[:1]
        return collapsed_rows

    return with_vectors(config, folder, make, rows)


def on_another_scale(config: NightConfig, folder: Path) -> NightConfig:
    return with_vectors(config, folder, lambda vectors: vectors * np.float32(50))


def with_values(config: NightConfig, folder: Path, factor: float, offset: float) -> NightConfig:
    """Return the bundle with another value model: factor times the value, plus an offset."""
    shutil.copytree(config.path(config.bundle), folder / "bundle")
    bundle = Bundle.open(folder / "bundle")
    models = {}
    for name, model in bundle.value_models.items():
        proto = onnx.load(model.path)
        output = next(node for node in proto.graph.node if model.spec.output in node.output)
        output.output[list(output.output).index(model.spec.output)] = "before"
        for number, value in (("factor", factor), ("offset", offset)):
            proto.graph.initializer.append(numpy_helper.from_array(np.array([value], np.float32), number))
        proto.graph.node.append(helper.make_node("Mul", ["before", "factor"], ["product"]))
        proto.graph.node.append(helper.make_node("Add", ["product", "offset"], [model.spec.output]))
        models[name] = ModelFile(OnnxModel(proto.SerializeToString()), model.spec, labels=model.labels)
    user_tower, item_tower = (
        ModelFile(OnnxModel(model.path.read_bytes()), model.spec, entity=model.entity)
        for model in (bundle.user_tower, bundle.item_tower)
    )
    write_bundle(
        folder / "changed", name="changed", version="2", dims=bundle.dims, values=models,
        item_ids=[raw.decode() for raw in bundle.item_ids], user_tower=user_tower, item_tower=item_tower,
    )  # fmt: skip
    return replace(config, bundle=str(folder / "changed"))


def constant_value_model(config: NightConfig, folder: Path) -> NightConfig:
    return with_values(config, folder, 0.0, 0.5)


def values_on_another_scale(config: NightConfig, folder: Path) -> NightConfig:
    return with_values(config, folder, 50.0, 0.0)


def with_clicks(config: NightConfig, folder: Path, edit: Callable[[Any], Any]) -> NightConfig:
    pq.write_table(edit(pq.read_table(config.path("interactions.parquet"))), folder / "clicks.parquet")
    sources = replace(
        config.sources, interactions=(str(folder / "clicks.parquet"),),
        item_features=str(config.path("items.parquet")),
    )  # fmt: skip
    return replace(config, sources=sources)


def relabelled(table: Any, column: str, seed: int) -> Any:
    coded = table[column].combine_chunks().dictionary_encode()
    order = np.random.default_rng(seed).permutation(len(coded.dictionary))
    relabelled_column = coded.dictionary.take(pa.array(order[np.asarray(coded.indices)]))
    return table.set_column(table.column_names.index(column), column, relabelled_column)


def histories_exchanged(config: NightConfig, folder: Path) -> NightConfig:
    return with_clicks(config, folder, lambda table: relabelled(table, "user", 3))


def clicks_on_other_items(config: NightConfig, folder: Path) -> NightConfig:
    return with_clicks(config, folder, lambda table: relabelled(table, "item", 4))


def user_ids_in_another_form(config: NightConfig, folder: Path) -> NightConfig:
    """Write ids as a reader does that takes "007" for a number."""

    def edit(table: Any) -> Any:
        users = pa.array([f"{user_id}.0" for user_id in table["user"].to_pylist()], pa.string())
        return table.set_column(table.column_names.index("user"), "user", users)

    return with_clicks(config, folder, edit)


def half_the_source(config: NightConfig, folder: Path) -> NightConfig:
    def edit(table: Any) -> Any:
        users = np.asarray(table["user"].combine_chunks().dictionary_encode().indices)
        return table.filter(pa.array(users % 2 == 0))

    return with_clicks(config, folder, edit)


def half_the_catalogue(config: NightConfig, folder: Path) -> NightConfig:
    table = pq.read_table(config.path("items.parquet"))
    pq.write_table(table.slice(0, len(table) // 2), folder / "items.parquet")
    return replace(config, sources=replace(config.sources, item_features=str(folder / "items.parquet")))


BAD_INPUTS: Mapping[str, tuple[Change, str]] = {
    change.__name__: (change, rule)
    for change, rule in (
        (bundle_vocabulary_shuffled, "vocabulary"), (retrained_and_shuffled, "list_jaccard"),
        (untrained, "list_jaccard"), (collapsed, "list_jaccard"), (on_another_scale, "score_psi"),
        (histories_exchanged, "list_jaccard"), (clicks_on_other_items, "list_jaccard"),
        (user_ids_in_another_form, "list_jaccard"), (half_the_source, "coverage_of_live"),
        (half_the_catalogue, "items_of_live"), (constant_value_model, "distinct_values"),
        (values_on_another_scale, "value_psi"),
    )
}  # fmt: skip
"""Name -> (change, the rule that must name it)."""
