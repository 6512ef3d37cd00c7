"""A small reference bundle, and a predictor over it as a generation has."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import orjson
from numpy.typing import NDArray

from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import Producer, Table
from cache.model.candidate_search import Searcher
from cache.model.predictor import ModelPrecision, Predictor
from cache.model.tower import Histories, Tower
from cache.records import Layout
from cache.store.artefacts import sha256_of
from precompute.bundles.bundle import BUNDLE_FILE, Bundle
from precompute.bundles.index import build_index
from precompute.bundles.quantize import quantize_tower
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train

USERS, ITEMS = 60, 40
K = 10


def interactions(seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (user rows, item rows): each user prefers one half of the items."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(USERS), 8)
    halves = rng.random(len(users)) < 0.85
    items = rng.integers(0, ITEMS // 2, len(users)) * 2 + ((users + halves) % 2)
    return users, items


def train_small(
    bundle_folder: Path, *, dims: int = 16, categories: Sequence[str] | None = None, seed: int = 0
) -> Bundle:
    """Train the reference model on a few dozen users and items."""
    users, items = interactions()
    ids = [f"item-{number}" for number in range(ITEMS)]
    data = ReferenceData(users, items, ids, categories)
    return train(data, bundle_folder, dims=dims, seed=seed, shape=SpectralShape())


def histories_of(users: int = USERS) -> Histories:
    """Return the model indices of every user's history."""
    rows, items = interactions()
    return Histories.of([items[rows == user] for user in range(users)])


def item_table(bundle: Bundle) -> ItemTable:
    """Return the item table of a generation over all items of the bundle, in hash order."""
    hashes = hash_ids(bundle.item_ids, 1)
    order = np.argsort(hashes)
    raw = [bundle.item_ids[index] for index in order]
    offsets = np.concatenate([[0], np.cumsum([len(raw_id) for raw_id in raw])]).astype(np.uint64)
    tower = Tower.open(bundle.item_tower.path, bundle.item_tower.spec)
    return ItemTable(
        Directory(1, [0], [hashes[order]]),
        np.frombuffer(b"".join(raw), np.uint8),
        offsets,
        tower.run({"item_index": order}),
        order.astype(np.int64),
    )


def make_predictor(bundle: Bundle, folder: Path, *, precision: ModelPrecision = "int8") -> tuple[Predictor, ItemTable]:
    """Return a predictor with one table of every kind."""
    folder.mkdir(parents=True, exist_ok=True)
    items = item_table(bundle)
    towers = {}
    for model in bundle.models:
        path = model.path
        if precision == "int8":
            path = folder / f"{model.name}.int8.onnx"
            sample = (
                {"history": histories_of()}
                if model.entity == "user"
                else {"item_index": np.arange(len(bundle.item_ids))}
            )
            quantize_tower(model.path, model.spec, sample, path)
        towers[model.name] = Tower.open(path, model.spec)
    searchers = {}
    for metric in ("inner_product", "cosine"):
        file = folder / f"{metric}.faiss"
        build_index(items.vectors, metric, file)
        searchers[metric] = Searcher.open(file, metric, expected_vector_count=items.count)
    labels = bundle.value_models["user_affinity"].labels

    def table(name: str, entity: str, producer: Producer, layout: Layout) -> Table:
        return Table(name, entity, producer, layout, 4, (), labels)

    tables = [
        table("user_topk", "user", Producer("topk", "user_tower", "inner_product"), Layout("topk", K, "f4")),
        table("item_similar", "item", Producer("similar", "item_tower", "cosine"), Layout("topk", K, "f4")),
        table("user_vector", "user", Producer("tower", "user_tower"), Layout("vector", bundle.dims, "f4")),
        table("user_affinity", "user", Producer("value", "user_affinity"), Layout("value", len(labels), "f4")),
    ]
    predictor = Predictor(
        {record_table.name: record_table for record_table in tables},
        items,
        towers,
        searchers,
        dict.fromkeys(towers, precision),
        bundle.digest,
    )
    return predictor, items


def ordinals_of(items: ItemTable, ids: Sequence[bytes]) -> Ordinals:
    """Return the ordinals of item ids."""
    return items.ordinals_of(list(ids))


def externalize_weights(folder: Path, name: str, location: str = "", **entry: str) -> Path:
    """Move a tower's weights to a file beside its model, list it in `bundle.json`, and return its path.

    `entry` are other fields of the tower in `bundle.json`, say where its model lies.
    """
    bundle_json = orjson.loads((folder / BUNDLE_FILE).read_bytes())
    bundle_json[name].update(entry)
    path = folder / str(bundle_json[name]["path"])
    weights_path = path.with_name(location or f"{name}.weights")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=weights_path.name, size_threshold=64)
    weights_entry = {"path": str(weights_path.relative_to(folder)), "sha256": sha256_of(weights_path)}
    bundle_json[name].update(sha256=sha256_of(path), weights=weights_entry)
    (folder / BUNDLE_FILE).write_bytes(orjson.dumps(bundle_json))
    return weights_path
