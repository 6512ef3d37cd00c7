"""Inputs of users as a generation publishes them: the items that each had, when, and what else its tower was given."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.model.tower_spec import TowerSpec
from precompute.scoring.tables import GrowingFile
from precompute.scoring.users.chunk import Chunk
from precompute.scoring.users.work import ShardWork
from precompute.sources.features import read_values


def given_features(
    spec: TowerSpec, features: Mapping[str, Any], published: NDArray[np.bool_]
) -> Histories:
    """Columns of features as rows of JSON by column, as callers send them; a value that cannot be used is left out.

    The row is empty of who is not `published`, or has no such value.
    """
    row_features: list[dict[str, Any]] = [{} for _ in published]
    # Two inputs may read one column: a whole number is what both take.
    for feature in sorted(spec.features, key=lambda feature: feature.dtype != "float32"):
        name = str(feature.column)
        values = read_values(features[name], feature)
        numbers = values.numbers.tolist()
        for row in np.flatnonzero(values.usable & published).tolist():
            row_features[row][name] = numbers[row]
    rows = [orjson.dumps(row) if row else b"" for row in row_features]
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    bytes_: Any = np.frombuffer(b"".join(rows), np.uint8)
    return Histories(ends, bytes_)


def write_inputs(work: ShardWork, chunk: Chunk, files: Mapping[str, GrowingFile]) -> None:
    """Writes the inputs of the users of a chunk's range, in hash order, copied ones among them."""
    copied, reuse = chunk.copied, work.reuse
    copied_rows, base_positions = copied.copied_rows, copied.copied_positions
    seen_items, times, feature_json, has_vector = (
        chunk.seen_items,
        chunk.times,
        chunk.feature_json,
        chunk.has_own_vector,
    )
    if reuse is not None and len(copied_rows):
        seen_items = copied.merge_histories(
            seen_items, reuse.read_seen_items(base_positions[copied_rows])
        )
        if times is not None:
            times = copied.merge_histories(times, reuse.read_times(base_positions[copied_rows]))
        if feature_json is not None:
            feature_json = copied.merge_histories(
                feature_json, reuse.read_feature_json(base_positions[copied_rows])
            )
        if has_vector is not None:
            has_vector = copied.merge_values(
                has_vector, reuse.read_own_vector_mask(base_positions[copied_rows])
            )
    _grow(work, "seen", seen_items, files["ends"])
    files["items"].write_array(seen_items.indices.astype("<u4"))
    if times is not None:
        files["times"].write_array(times.indices.astype("<i8"))
    if feature_json is not None:
        _grow(work, "given", feature_json, files["feature_ends"])
        files["features"].write_array(feature_json.indices.astype("u1"))
    if has_vector is not None:
        files["brought"].write_array(has_vector.astype("u1"))


def _grow(work: ShardWork, count: str, rows: Histories, ends: GrowingFile) -> None:
    """Writes where each row ends among those of all chunks."""
    ends.write_array((work.counts[count] + rows.indptr[1:]).astype("<u8"))
    work.counts[count] += int(rows.indptr[-1])
