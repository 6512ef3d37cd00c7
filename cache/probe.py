"""The probe: what the night computed a sample of users from, so that answers can be computed once more.

One file of a generation, named in the manifest's facts: an Arrow stream of the users with the lowest hashes (so: users
at random), their histories as ordinals, oldest first, and one column per feature.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.artefacts import write_atomically
from cache.errors import CorruptArtefact
from cache.items import ItemTable
from cache.keys import FeatureValue
from cache.preparing import LiveInput

FILE: Final = "probe.arrow"
FACT: Final = "probe"
USERS_MAX: Final = 8_192
"""Some 2 MB at 50 items each; a generation of fewer users has them all in it."""

_PREFIX = "feature:"


def probe_part(
    hashes: NDArray[np.uint64],
    indptr: NDArray[np.int64],
    ordinals: NDArray[np.int64],
    features: Mapping[str, Any],
    rows: NDArray[np.int64],
) -> Any:
    """An Arrow table of the entities at `rows`, ascending, of a shard in hash order."""
    pieces = [ordinals[indptr[row] : indptr[row + 1]] for row in rows.tolist()]
    ends = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
    flat = np.concatenate([*pieces, np.empty(0, np.int64)]).astype(np.uint32)
    return pa.table({
        "hash": pa.array(hashes[rows]),
        "history": pa.ListArray.from_arrays(pa.array(ends), pa.array(flat)),
        **{_PREFIX + name: column.take(pa.array(rows)) for name, column in features.items()},
    })  # fmt: skip


def write_probe(root: Path, parts: Sequence[Any]) -> str:
    """The parts in hash order, as one file; its path."""
    table = pa.concat_tables(parts).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomically(root / FILE, sink.getvalue().to_pybytes())
    return FILE


def probe_bytes(users: int, history: float) -> int:
    """About what the file takes: a hash, an offset and so many ordinals each."""
    return round(min(users, USERS_MAX) * (8 + 4 + 4 * history))


class Probe:
    """The inputs of some users of a generation, memory-mapped."""

    def __init__(self, table: Any, items: ItemTable) -> None:
        self._table = table
        self._items = items
        self._hashes = np.asarray(table.column("hash").combine_chunks())
        self._features = [name for name in table.column_names if name.startswith(_PREFIX)]

    @classmethod
    def open(cls, file: Path, items: ItemTable) -> Self:
        """Raises CorruptArtefact for what is no probe."""
        try:
            with pa.memory_map(str(file)) as source:
                return cls(pa.ipc.open_stream(source).read_all(), items)
        except (pa.ArrowException, KeyError) as error:
            raise CorruptArtefact(f"{file.name} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._hashes)

    def of(self, hash_: int) -> LiveInput | None:
        """The input of the user with this hash, as a caller would send it."""
        wanted = np.uint64(hash_)
        row = int(self._hashes.searchsorted(wanted))
        if row >= len(self._hashes) or self._hashes[row] != wanted:
            return None
        history = self._table.column("history")[row].as_py()
        features: dict[str, FeatureValue] = {}
        for name in self._features:
            value = self._table.column(name)[row].as_py()
            features[name.removeprefix(_PREFIX)] = (
                tuple(value) if isinstance(value, list) else value
            )
        return LiveInput(tuple(map(self._items.raw_id, history)), features or None)
