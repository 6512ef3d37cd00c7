"""The catalogue: which items a generation knows, in ordinal order, and their vectors."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.artefacts import write_atomically
from cache.directory import Directory, map_file
from cache.errors import SourceError
from cache.items import ItemTable
from cache.keys import canonical_id, hash_ids
from cache.tower import InputSpec, TowerSpec
from precompute.config import NightConfig
from precompute.models.bundle import Bundle
from precompute.scoring.partition import sort_unique
from precompute.scoring.shard_files import first_hash
from precompute.scoring.shard_input import Hasher
from precompute.sources import read_features

IDS, OFFSETS, MODEL_INDEX, VECTORS, ITEM_FEATURES = (
    "items/ids.bin",
    "items/offsets.bin",
    "items/model_index.i64",
    "items/vectors.f32",
    "work/item_features.arrow",
)


def needs_index(bundle: Bundle) -> bool:
    """Whether a model of items can only answer for items of the bundle's own vocabulary."""
    return any(
        each.bind == "item_index"
        for model in bundle.models
        if model.entity == "item"
        for each in model.spec.inputs
    )


def write_catalogue(
    config: NightConfig,
    bundle: Bundle,
    root: Path,
    *,
    hasher: Hasher = hash_ids,
    erased: Collection[bytes] = (),
) -> dict[str, Any]:
    """Write ids, offsets, model indices and the item directory; returns seed, counts and what was left out.

    The items are those of the feature table if there is one, else the bundle's. An item that the models cannot
    answer for (not in their vocabulary, where they want an index) is left out and counted; an erased one is just not
    there.
    """
    vocabulary = {raw: index for index, raw in enumerate(bundle.item_ids)}
    listed = _listed(config) or list(bundle.item_ids)
    if len(set(listed)) != len(listed):
        raise SourceError(f"{config.sources.item_features} lists an item twice")
    listed = [raw for raw in listed if raw not in erased]
    usable = [raw for raw in listed if raw in vocabulary] if needs_index(bundle) else listed
    if not usable:
        raise SourceError(f"the model knows none of the {len(listed)} items of the catalogue")
    seed = 0
    while (order := sort_unique(usable, seed, hasher)) is None:
        seed += 1
    ids = [usable[place] for place in order.tolist()]
    hashes = hasher(ids, seed)
    offsets = np.concatenate([[0], np.cumsum([len(raw) for raw in ids])]).astype("<u8")
    write_atomically(root / IDS, b"".join(ids))
    write_atomically(root / OFFSETS, offsets.tobytes())
    model_index = np.array([vocabulary.get(raw, -1) for raw in ids], "<i8")
    write_atomically(root / MODEL_INDEX, model_index.tobytes())
    firsts = np.array(
        [first_hash(shard, config.shards) for shard in range(config.shards)], np.uint64
    )
    bounds = [*hashes.searchsorted(firsts).tolist(), len(ids)]
    for shard in range(config.shards):
        part = hashes[bounds[shard] : bounds[shard + 1]]
        write_atomically(root / directory_file("item", shard), part.astype("<u8").tobytes())
    return {
        "item_seed": seed,
        "items": len(ids),
        "items_without_vector": len(listed) - len(usable),
        "bounds": bounds,
    }


def _listed(config: NightConfig) -> list[bytes] | None:
    if not config.sources.item_features:
        return None
    path = config.path(config.sources.item_features)
    batches = read_features(path, config.sources.item_column, ())
    return [canonical_id(text) for ids, _ in batches for text in ids.texts().to_pylist()]


def directory_file(entity: str, shard: int) -> str:
    """Path of one directory part."""
    return f"directory/{entity}/{shard:04d}.u64"


def open_items(root: Path, begun: Mapping[str, Any], *, dims: int = 0) -> ItemTable:
    """The item table of a build; with `dims`, its vectors as well."""
    bounds = begun["bounds"]
    shards = len(bounds) - 1
    parts = [
        map_file(root / directory_file("item", shard), "<u8")
        if bounds[shard + 1] > bounds[shard]
        else np.empty(0, np.uint64)
        for shard in range(shards)
    ]
    directory = Directory(
        begun["item_seed"], [first_hash(shard, shards) for shard in range(shards)], parts
    )
    vectors: NDArray[np.float32] = np.empty((0, 0), np.float32)
    if dims:
        vectors = map_file(root / VECTORS, "<f4", (begun["items"], dims))
    return ItemTable(
        directory,
        map_file(root / IDS, "u1"),
        map_file(root / OFFSETS, "<u8"),
        vectors,
        map_file(root / MODEL_INDEX, "<i8"),
    )


def write_item_features(
    config: NightConfig, bundle: Bundle, items: ItemTable, root: Path
) -> str | None:
    """Pin the feature columns that models of items want, a row per ordinal; the file, None when none is wanted.

    Raises SourceError naming an item without a row or a value.
    """
    columns = sorted({
        str(each.column)
        for model in bundle.models if model.entity == "item"
        for each in model.spec.features
    })  # fmt: skip
    if not columns:
        return None
    if not config.sources.item_features:
        raise SourceError(
            f"the model wants the item feature {columns[0]!r}, but sources.item_features is not set"
        )
    path = config.path(config.sources.item_features)
    batches = list(read_features(path, config.sources.item_column, columns))
    ids = [canonical_id(text) for batch, _ in batches for text in batch.texts().to_pylist()]
    ordinals = items.ordinals_of(ids)
    rows = np.full(items.count, -1, np.int64)
    rows[ordinals[ordinals >= 0]] = np.flatnonzero(ordinals >= 0)
    if (rows < 0).any():
        lacking = items.id_of(int((rows < 0).argmax()))
        raise SourceError(f"{path} has no row for item {lacking!r}", item=lacking)
    placed = {
        name: pa.concat_arrays([batch[name] for _, batch in batches]).take(pa.array(rows))
        for name in columns
    }
    for name, column in placed.items():
        if column.null_count:
            lacking = items.id_of(int(np.asarray(column.is_null()).argmax()))
            raise SourceError(f"{path}: item {lacking!r} has no {name!r}", item=lacking)
    table = pa.table(placed)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomically(root / ITEM_FEATURES, sink.getvalue().to_pybytes())
    return ITEM_FEATURES


def item_features(file: Path, spec: TowerSpec) -> dict[str, NDArray[Any]]:
    """Feature inputs of all items in ordinal order, by the tower's input names, as `write_item_features` left them."""
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    return {
        each.name: to_numpy(table.column(str(each.column)).combine_chunks(), each)
        for each in spec.features
    }


def to_numpy(column: Any, spec: InputSpec) -> NDArray[Any]:
    """An Arrow column as the array that an input wants; raises SourceError naming both sides."""
    kind = column.type
    fits = {
        "string": pa.types.is_string(kind) or pa.types.is_large_string(kind),
        "float32": pa.types.is_floating(kind) or pa.types.is_integer(kind),
        "int32": pa.types.is_integer(kind),
        "int64": pa.types.is_integer(kind),
    }
    if spec.width is not None:
        rows = column.to_pylist()
        if any(not isinstance(row, list) or len(row) != spec.width or None in row for row in rows):
            raise SourceError(
                f"column {spec.column!r} is {kind}, the model's input {spec.name!r} wants width {spec.width}"
            )
        values: NDArray[Any] = np.array(rows, spec.dtype)
        if spec.dtype != "string" and not np.isfinite(values).all():
            raise SourceError(f"column {spec.column!r} holds a non-finite number")
        return values
    if not fits[spec.dtype]:
        raise SourceError(
            f"column {spec.column!r} is {kind}, the model's input {spec.name!r} wants {spec.dtype}"
        )
    if column.null_count:
        raise SourceError(f"column {spec.column!r} holds {column.null_count} missing values")
    if spec.dtype == "string":
        return np.array(column.to_pylist(), object)
    given = np.asarray(column)
    numbers: NDArray[Any] = given.astype(spec.dtype)
    if spec.dtype != "float32" and (numbers != given).any():
        raise SourceError(
            f"column {spec.column!r} holds numbers too large for {spec.dtype}, which the model wants"
        )
    if not np.isfinite(numbers).all():
        raise SourceError(f"column {spec.column!r} holds a non-finite number")
    return numbers


def popular(
    items: ItemTable, popularity: NDArray[np.int64], k: int
) -> tuple[Sequence[str], list[float]]:
    """The k most popular items and their share of all interactions; ties by ordinal."""
    order = np.lexsort((np.arange(items.count), -popularity))[: min(k, items.count)]
    total = max(1, int(popularity.sum()))
    return items.ids_of(order.astype(np.uint32)), [
        float(popularity[each]) / total for each in order.tolist()
    ]
