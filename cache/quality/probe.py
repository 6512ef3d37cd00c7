"""Probe: the nightly inputs of a sample of users, from which their answers can be recomputed.

One file of a generation, named in the manifest's facts: an uncompressed `.npz` of the users with the lowest hashes (a
random sample), their histories as ordinals, oldest first, and each user's features as JSON. Readers need only numpy.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.ids import FeatureValue
from cache.format.item_table import ItemTable
from cache.model.input_preparation import LiveInput
from cache.store.artefacts import write_atomically

PROBE_FILE: Final = "probe.npz"
PROBE_FACT: Final = "probe"
PROBE_USERS_MAX: Final = 8_192
"""Number of users in the probe, about 2 MB at 50 items each; a smaller generation has all of its users in the probe."""


class ProbePart(NamedTuple):
    """Part of the probe: some users, ascending by hash."""

    user_hashes: NDArray[np.uint64]
    histories: Sequence[NDArray[np.int64]]
    """Item ordinals of each user, oldest first."""
    feature_documents: Sequence[bytes]
    """Features of each user, as a JSON object."""


def probe_part(
    shard_hashes: NDArray[np.uint64],
    history_indptr: NDArray[np.int64],
    history_ordinals: NDArray[np.int64],
    feature_columns: Mapping[str, Any],
    row_indexes: NDArray[np.int64],
) -> ProbePart:
    """Return the entities at the ascending `row_indexes` of a shard in hash order; features are Arrow columns."""
    histories = [history_ordinals[history_indptr[row] : history_indptr[row + 1]] for row in row_indexes.tolist()]
    feature_names, columns = (list(feature_columns), [column.take(row_indexes) for column in feature_columns.values()])
    # Row by row: a wide feature of all users would need millions of Python numbers at once.
    feature_texts = [
        orjson.dumps({name: column[row].as_py() for name, column in zip(feature_names, columns, strict=True)})
        for row in range(len(row_indexes))
    ]
    return ProbePart(shard_hashes[row_indexes], histories, feature_texts)


def write_probe(generation_folder: Path, parts: Sequence[ProbePart]) -> str:
    """Write the parts, in hash order, as one file; return its path relative to `generation_folder`."""
    history_ends, joined_histories = _join_with_ends(
        [history for part in parts for history in part.histories], np.uint32
    )
    feature_texts = [text for part in parts for text in part.feature_documents]
    feature_ends, feature_bytes = _join_with_ends([np.frombuffer(text, np.uint8) for text in feature_texts], np.uint8)
    npz_buffer = io.BytesIO()
    np.savez(
        npz_buffer,
        hashes=np.concatenate([part.user_hashes for part in parts]),
        history_ends=history_ends,
        histories=joined_histories,
        feature_ends=feature_ends,
        features=feature_bytes,
    )
    write_atomically(generation_folder / PROBE_FILE, npz_buffer.getvalue())
    return PROBE_FILE


def estimate_probe_bytes(user_count: int, mean_history_items: float) -> int:
    """Estimate the file's size in bytes: a hash, two offsets, `{}` and so many ordinals per user."""
    return round(min(user_count, PROBE_USERS_MAX) * (8 + 16 + 2 + 4 * mean_history_items))


class Probe:
    """Inputs of some users of a generation."""

    def __init__(self, array_by_name: Mapping[str, NDArray[Any]], items: ItemTable) -> None:
        self._items = items
        self._hashes = array_by_name["hashes"]
        self._histories, self._history_ends = array_by_name["histories"], array_by_name["history_ends"]
        self._features, self._feature_ends = array_by_name["features"], array_by_name["feature_ends"]

    @classmethod
    def open(cls, probe_file: Path, items: ItemTable) -> Self:
        """Open a probe file; raise CorruptArtefact if it is malformed."""
        try:
            with np.load(probe_file, allow_pickle=False) as arrays:
                return cls(dict(arrays), items)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CorruptArtefact(f"{probe_file.name} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._hashes)

    def input_of(self, entity_hash: int) -> LiveInput | None:
        """Return the input of the user with this hash, in a caller's form."""
        user_hash = np.uint64(entity_hash)
        row = int(self._hashes.searchsorted(user_hash))
        if row >= len(self._hashes) or self._hashes[row] != user_hash:
            return None
        history = self._histories[self._history_ends[row] : self._history_ends[row + 1]].tolist()
        features_json = self._features[self._feature_ends[row] : self._feature_ends[row + 1]].tobytes()
        features: dict[str, FeatureValue] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in orjson.loads(features_json).items()
            if value is not None
        }
        return LiveInput(tuple(map(self._items.raw_id, history)), features or None)


def _join_with_ends(pieces: Sequence[NDArray[Any]], dtype: type[np.generic]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return int64 [pieces + 1], the offsets of the pieces and the end of the last one, and the joined pieces."""
    ends = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return ends, np.concatenate([*pieces, np.empty(0, dtype)]).astype(dtype)
