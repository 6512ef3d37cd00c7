"""Digests of inputs: 64 bits for the data that a model, and its list, use of one user or item.

Two inputs that differ have one digest with a chance of 2**-64: numbers are mixed by the finalizer of SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), texts by xxh3, and the parts of a row are
added after each was mixed with its position.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.format.ids import FINGERPRINT_SEED
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower import repeat_values
from cache.model.tower_spec import TowerSpec
from cache.store.artefacts import write_atomically
from precompute.bundles.bundle import Bundle
from precompute.partitions.catalogue import ITEM_FEATURES
from precompute.partitions.shard_input import ShardInput
from precompute.sources.columns import is_text, text_hashes

Digests = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MISSING = np.uint64(0x6C8E9CF570932BD5)
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def mixed(numbers: Digests) -> Digests:
    """Return each number mixed over all 64 bits."""
    mixed_numbers = numbers + _GOLDEN
    for shift, factor in _STEPS:
        mixed_numbers = (mixed_numbers ^ (mixed_numbers >> shift)) * factor
    mixed_numbers ^= mixed_numbers >> np.uint64(31)
    return mixed_numbers


def of_rows(values: Digests, starts: NDArray[np.int64]) -> Digests:
    """Return digests [rows] of rows of values in order, row i being `values[starts[i]:starts[i + 1]]`."""
    lengths = np.diff(starts)
    if not len(lengths):
        return np.empty(0, np.uint64)
    offsets_in_row = np.arange(len(values)) - repeat_values(starts[:-1] - starts[0], lengths)
    spread = mixed(values ^ mixed(offsets_in_row.astype(np.uint64)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(spread, dtype=np.uint64)])
    bounds = starts - starts[0]
    return mixed(sums[bounds[1:]] - sums[bounds[:-1]] + lengths.astype(np.uint64))


def of_column(column: Any) -> Digests:
    """Return digests [rows] of an Arrow array of texts, numbers, times, booleans, or lists of them; null is a value."""
    if isinstance(column, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.uint64), *map(of_column, column.chunks)])
    kind = column.type
    if pa.types.is_dictionary(kind):
        return of_column(column.dictionary_decode())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
        digests = of_rows(of_column(column.flatten()), np.concatenate([[0], np.cumsum(lengths)]))
    elif is_text(kind):
        filled = pc.fill_null(column, "") if column.null_count else column
        digests = mixed(text_hashes(filled.cast(pa.string()), 0))
    elif pa.types.is_floating(kind):
        filled = pc.fill_null(column, 0.0) if column.null_count else column
        digests = mixed(np.ascontiguousarray(np.asarray(filled), np.float64).view(np.uint64))
    else:
        numbers = column.cast(pa.int64(), safe=False)
        filled = pc.fill_null(numbers, 0) if numbers.null_count else numbers
        digests = mixed(np.asarray(filled).view(np.uint64))
    if column.null_count:
        digests = np.where(np.asarray(column.is_null()), _MISSING, digests)
    return digests


def of_columns(columns: Mapping[str, Any], count: int) -> Digests:
    """Return digests [count] of the rows of named columns, independent of the columns' order."""
    digests = np.zeros(count, np.uint64)
    for name, column in columns.items():
        (named,) = text_hashes(pa.array([name]), 0)
        digests += mixed(of_column(column) ^ named)
    return digests


def of_users(entities: ShardInput, items: Digests) -> Digests:
    """Return digests [entities] of a night's data on each: id, the history by the items' hashes, features, vector.

    If the night publishes the times of histories, these too: copied and computed users have the same ones.
    """
    digests = of_rows(items[entities.ordinals], entities.indptr)
    digests ^= mixed(text_hashes(entities.ids, FINGERPRINT_SEED))
    digests = mixed(digests + of_columns(entities.features, len(digests)))
    if entities.vectors is not None:
        bits = np.ascontiguousarray(entities.vectors).view(np.uint32).astype(np.uint64)
        starts = np.arange(len(digests) + 1) * bits.shape[1]
        digests = mixed(digests ^ of_rows(bits.ravel(), starts))
    if entities.times is not None:
        digests = mixed(digests + of_rows(entities.times.view(np.uint64), entities.indptr))
    return digests


def digests_file(model: str) -> str:
    """Return the path of the digests of an item model's inputs."""
    return f"work/item_inputs/{model}.u64"


def digests_files(bundle: Bundle) -> list[str]:
    """Return the paths of the digests of all item models."""
    return [digests_file(model.name) for model in bundle.models if model.entity == "item"]


def write_item_digests(bundle: Bundle, items: ItemTable, root: Path) -> None:
    """Write the digest of every item's input for each item model."""
    for model in bundle.models:
        if model.entity == "item":
            item_digests = _of_items(model.spec, items, root)
            write_atomically(root / digests_file(model.name), item_digests.astype("<u8").tobytes())


def _of_items(spec: TowerSpec, items: ItemTable, root: Path) -> Digests:
    count = items.count
    columns: dict[str, Any] = {}
    if spec.features:
        with pa.memory_map(str(root / ITEM_FEATURES)) as source:
            table = pa.ipc.open_stream(source).read_all()
        columns = {
            name: table.column(name) for name in {str(feature.column) for feature in spec.features}
        }
    item_digests = of_columns(columns, count)
    if any(input_spec.bind == "item_index" for input_spec in spec.inputs):
        item_digests += mixed(items.model_indices_of(Ordinals(np.arange(count))).astype(np.uint64))
    return item_digests
