"""The probe: inputs of a sample of users as the night had them, from which their answers can be computed once more.

One file of a generation, named in the manifest's facts: an uncompressed `.npz` of the users with the lowest hashes (so:
users at random), their histories as ordinals, oldest first, and the features of each as JSON. Readers need only numpy.
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

FILE: Final = "probe.npz"
FACT: Final = "probe"
USERS_MAX: Final = 8_192
"""Number of users in the probe, some 2 MB at 50 items each; a smaller generation has all of its users in it."""


class ProbePart(NamedTuple):
    """Part of the probe: some users, ascending by hash."""

    hashes: NDArray[np.uint64]
    histories: Sequence[NDArray[np.int64]]
    """Item ordinals of each user, oldest first."""
    features: Sequence[bytes]
    """Features of each user, as a JSON object."""


def probe_part(
    hashes: NDArray[np.uint64],
    indptr: NDArray[np.int64],
    ordinals: NDArray[np.int64],
    features: Mapping[str, Any],
    rows: NDArray[np.int64],
) -> ProbePart:
    """The entities at `rows`, ascending, of a shard in hash order; features are Arrow columns."""
    histories = [ordinals[indptr[row] : indptr[row + 1]] for row in rows.tolist()]
    names, columns = list(features), [column.take(rows) for column in features.values()]
    # Row by row: a wide feature of all of them would be millions of Python numbers at once.
    texts = [
        orjson.dumps(
            {name: column[row].as_py() for name, column in zip(names, columns, strict=True)}
        )
        for row in range(len(rows))
    ]
    return ProbePart(hashes[rows], histories, texts)


def write_probe(root: Path, parts: Sequence[ProbePart]) -> str:
    """Writes the parts, in hash order, as one file; returns its path relative to `root`."""
    ends, flat = _joined([history for part in parts for history in part.histories], np.uint32)
    texts = [text for part in parts for text in part.features]
    feature_ends, characters = _joined([np.frombuffer(text, np.uint8) for text in texts], np.uint8)
    sink = io.BytesIO()
    np.savez(
        sink,
        hashes=np.concatenate([part.hashes for part in parts]),
        history_ends=ends,
        histories=flat,
        feature_ends=feature_ends,
        features=characters,
    )
    write_atomically(root / FILE, sink.getvalue())
    return FILE


def probe_bytes(users: int, history: float) -> int:
    """Approximate bytes of the file: a hash, two offsets, `{}` and so many ordinals for each user."""
    return round(min(users, USERS_MAX) * (8 + 16 + 2 + 4 * history))


class Probe:
    """Inputs of some users of a generation."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], items: ItemTable) -> None:
        self._items = items
        self._hashes = arrays["hashes"]
        self._histories, self._history_ends = arrays["histories"], arrays["history_ends"]
        self._features, self._feature_ends = arrays["features"], arrays["feature_ends"]

    @classmethod
    def open(cls, file: Path, items: ItemTable) -> Self:
        """Open a probe file; raise CorruptArtefact if it is malformed."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return cls(dict(arrays), items)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CorruptArtefact(f"{file.name} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._hashes)

    def of(self, hash_: int) -> LiveInput | None:
        """The input of the user with this hash, as a caller would send it."""
        user_hash = np.uint64(hash_)
        row = int(self._hashes.searchsorted(user_hash))
        if row >= len(self._hashes) or self._hashes[row] != user_hash:
            return None
        history = self._histories[self._history_ends[row] : self._history_ends[row + 1]].tolist()
        text = self._features[self._feature_ends[row] : self._feature_ends[row + 1]].tobytes()
        features: dict[str, FeatureValue] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in orjson.loads(text).items()
            if value is not None
        }
        return LiveInput(tuple(map(self._items.raw_id, history)), features or None)


def _joined(
    pieces: Sequence[NDArray[Any]], dtype: type[np.generic]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Offsets where each piece begins and the last one ends, int64 [pieces + 1]; and the pieces joined."""
    ends = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return ends, np.concatenate([*pieces, np.empty(0, dtype)]).astype(dtype)
