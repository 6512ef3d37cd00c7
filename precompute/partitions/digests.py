"""Digests of inputs: 64 bits for all data from which a user's or an item's records are computed.

Different inputs have the same digest with probability 2**-64. Numbers are mixed by the finalizer of SplitMix64 (Steele,
Lea, Flood, "Fast splittable pseudorandom number generators", 2014), texts are hashed by xxh3, and the parts of a row
are each mixed with their position and then summed.
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
from precompute.partitions.catalogue import ITEM_FEATURES_FILE
from precompute.partitions.shard_input import ShardInput
from precompute.sources.columns import is_text_type, text_hashes

Digests = NDArray[np.uint64]

_GOLDEN_RATIO_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_NULL_DIGEST = np.uint64(0x6C8E9CF570932BD5)
_MIX_SHIFTS_AND_FACTORS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def mix_bits(numbers: Digests) -> Digests:
    """Return each number mixed over all 64 bits."""
    mixed_numbers = numbers + _GOLDEN_RATIO_INCREMENT
    for shift, factor in _MIX_SHIFTS_AND_FACTORS:
        mixed_numbers = (mixed_numbers ^ (mixed_numbers >> shift)) * factor
    mixed_numbers ^= mixed_numbers >> np.uint64(31)
    return mixed_numbers


def digest_value_rows(value_digests: Digests, row_starts: NDArray[np.int64]) -> Digests:
    """Return digests [rows] of rows of values, row i being `value_digests[row_starts[i]:row_starts[i + 1]]`."""
    row_lengths = np.diff(row_starts)
    if not len(row_lengths):
        return np.empty(0, np.uint64)
    offsets_in_row = np.arange(len(value_digests)) - repeat_values(row_starts[:-1] - row_starts[0], row_lengths)
    position_digests = mix_bits(value_digests ^ mix_bits(offsets_in_row.astype(np.uint64)))
    running_sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(position_digests, dtype=np.uint64)])
    relative_starts = row_starts - row_starts[0]
    return mix_bits(
        running_sums[relative_starts[1:]] - running_sums[relative_starts[:-1]] + row_lengths.astype(np.uint64)
    )


def digest_column(arrow_column: Any) -> Digests:
    """Return digests [rows] of an Arrow array of texts, numbers, times, booleans, or their lists; null has a digest."""
    if isinstance(arrow_column, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.uint64), *map(digest_column, arrow_column.chunks)])
    arrow_type = arrow_column.type
    if pa.types.is_dictionary(arrow_type):
        return digest_column(arrow_column.dictionary_decode())
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        list_lengths = np.asarray(pc.fill_null(pc.list_value_length(arrow_column), 0), np.int64)
        row_digests = digest_value_rows(
            digest_column(arrow_column.flatten()), np.concatenate([[0], np.cumsum(list_lengths)])
        )
    elif is_text_type(arrow_type):
        filled_column = pc.fill_null(arrow_column, "") if arrow_column.null_count else arrow_column
        row_digests = mix_bits(text_hashes(filled_column.cast(pa.string()), 0))
    elif pa.types.is_floating(arrow_type):
        filled_column = pc.fill_null(arrow_column, 0.0) if arrow_column.null_count else arrow_column
        row_digests = mix_bits(np.ascontiguousarray(np.asarray(filled_column), np.float64).view(np.uint64))
    else:
        int64_column = arrow_column.cast(pa.int64(), safe=False)
        filled_column = pc.fill_null(int64_column, 0) if int64_column.null_count else int64_column
        row_digests = mix_bits(np.asarray(filled_column).view(np.uint64))
    if arrow_column.null_count:
        row_digests = np.where(np.asarray(arrow_column.is_null()), _NULL_DIGEST, row_digests)
    return row_digests


def digest_columns(column_by_name: Mapping[str, Any], row_count: int) -> Digests:
    """Return digests [rows] of the rows of named columns, independent of the columns' order."""
    row_digests = np.zeros(row_count, np.uint64)
    for name, column in column_by_name.items():
        (name_digest,) = text_hashes(pa.array([name]), 0)
        row_digests += mix_bits(digest_column(column) ^ name_digest)
    return row_digests


def digest_users(shard_input: ShardInput, item_hashes: Digests) -> Digests:
    """Return digests [entities] of each user's data: id, item hashes of the history, features, vector.

    Times of histories are included if the night publishes them, so that a copied user's published times are correct.
    """
    user_digests = digest_value_rows(item_hashes[shard_input.history_ordinals], shard_input.history_indptr)
    user_digests ^= mix_bits(text_hashes(shard_input.entity_ids, FINGERPRINT_SEED))
    user_digests = mix_bits(user_digests + digest_columns(shard_input.features, len(user_digests)))
    if shard_input.entity_vectors is not None:
        vector_bits = np.ascontiguousarray(shard_input.entity_vectors).view(np.uint32).astype(np.uint64)
        row_starts = np.arange(len(user_digests) + 1) * vector_bits.shape[1]
        user_digests = mix_bits(user_digests ^ digest_value_rows(vector_bits.ravel(), row_starts))
    if shard_input.history_times is not None:
        user_digests = mix_bits(
            user_digests + digest_value_rows(shard_input.history_times.view(np.uint64), shard_input.history_indptr)
        )
    return user_digests


def item_digests_path(model_name: str) -> str:
    """Return the path of the digests of an item model's inputs."""
    return f"work/item_inputs/{model_name}.u64"


def item_digests_paths(bundle: Bundle) -> list[str]:
    """Return the paths of the digests of all item models."""
    return [item_digests_path(model.name) for model in bundle.models if model.entity == "item"]


def write_item_digests(bundle: Bundle, items: ItemTable, generation_folder: Path) -> None:
    """Write the digest of every item's input for each item model."""
    for model in bundle.models:
        if model.entity == "item":
            item_digests = _digest_items(model.spec, items, generation_folder)
            write_atomically(generation_folder / item_digests_path(model.name), item_digests.astype("<u8").tobytes())


def _digest_items(spec: TowerSpec, items: ItemTable, generation_folder: Path) -> Digests:
    item_count = items.count
    column_by_name: dict[str, Any] = {}
    if spec.features:
        with pa.memory_map(str(generation_folder / ITEM_FEATURES_FILE)) as source:
            column_table = pa.ipc.open_stream(source).read_all()
        column_by_name = {
            column_name: column_table.column(column_name)
            for column_name in {str(feature.column) for feature in spec.features}
        }
    item_digests = digest_columns(column_by_name, item_count)
    if any(input_spec.bind == "item_index" for input_spec in spec.inputs):
        item_digests += mix_bits(items.model_indices_of(Ordinals(np.arange(item_count))).astype(np.uint64))
    return item_digests
