"""Memory that each step of a night needs at most: a formula of the shape, in which no shard occurs. Pure."""

from collections.abc import Mapping
from typing import Final

from precompute.partitions.shard_input import COUNTED_ROWS, SLICE_BYTES, SLICE_ROWS
from precompute.planning.sizes import HASH_BYTES, NUMBER_BYTES, NightShape
from precompute.scoring.users.work import CHUNK_BYTES, CHUNKS_MOST
from precompute.sources.formats import BATCH_ROWS
from precompute.sources.readers import BATCH_BYTES

BASE_BYTES: Final = 350 << 20
"""Python with NumPy, Arrow, ONNX Runtime and FAISS."""

ROW_BYTES: Final = 150
"""Bytes of a row while it is grouped: columns, orders of sorts and masks."""

COUNTED_BYTES: Final = 64
"""Bytes of a row whose user is counted: hashes, marks and their orders."""

CHUNKS_BYTES: Final = CHUNKS_MOST * CHUNK_BYTES
"""Results of scoring under way, on a host of many cores."""

TILE_BYTES: Final = 256 << 20
"""Scores, keys and copies of one tile of items against all queries."""

ITEM_BYTES: Final = 160
"""Bytes of an item's id in `begin` and `train`: itself twice, two hashes, orders and places, how often it came."""

TRAINED_BYTES: Final = 60
"""Bytes of an interaction in `train`: two codes, and the sparse matrix with its copies."""


def step_bytes(shape: NightShape) -> Mapping[str, int]:
    """Resident memory at the peak of each step, by step; mapped files that the system may drop are counted as well.

    Vectors of items count once for each copy: as they are mapped, ready to be compared, inside a model or an index.
    """
    vectors = NUMBER_BYTES * shape.items * shape.dims
    ids = shape.items * ITEM_BYTES
    features = round(shape.items * shape.item_feature_bytes)
    model = shape.fp32_bytes // max(1, len(shape.model_bytes))
    grouped = _slice_bytes(shape)
    index = shape.index_bytes // max(1, shape.metrics)
    # All models at once, and the item tower beside them: each as its file is read, and as it is run.
    opened = 2 * (shape.fp32_bytes + model)
    steps = {
        "train": shape.interactions * TRAINED_BYTES + ids + 6 * vectors,
        "begin": opened + 3 * _batch_bytes(shape) + 2 * COUNTED_ROWS * COUNTED_BYTES + ids + 3 * features,
        "embed_items": 2 * model + features,
        "score": 2 * grouped + CHUNKS_BYTES + vectors + (shape.metrics + 1) * 3 * vectors // 2 + 2 * model + features,
        "assemble": 0,
        "index": grouped + TILE_BYTES + vectors + 3 * index + 2 * model,
        "quantize": grouped + TILE_BYTES + vectors + 4 * model + features,
        "load": 2 * (64 << 20),
        "verify": grouped + 2 * TILE_BYTES + vectors + index + 4 * model + features
        + HASH_BYTES * (shape.users // shape.shards + 4 * shape.items) + shape.directory_bytes,
    }  # fmt: skip
    return {step: BASE_BYTES + peak_bytes for step, peak_bytes in steps.items()}


def _batch_bytes(shape: NightShape) -> int:
    return max(BATCH_ROWS * ROW_BYTES, min(BATCH_BYTES, round(BATCH_ROWS * shape.feature_bytes)))


def _slice_bytes(shape: NightShape) -> int:
    """A slice while it is grouped: its rows, and three copies of its features."""
    per_shard = -(-shape.interactions // shape.shards)
    features = round(shape.users / shape.shards * shape.feature_bytes)
    return min(per_shard, SLICE_ROWS) * ROW_BYTES + 3 * min(features, SLICE_BYTES)
