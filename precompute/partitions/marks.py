"""Marks of entities with values from a further input: their unusable rows are counted separately."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.ids import fingerprints
from cache.format.manifest import EntityKind
from cache.store.artefacts import write_atomically


def marks_file(kind: EntityKind) -> str:
    """Return the path, in a generation's folder, of the sorted fingerprints of users, or items, with event values."""
    return f"work/set_by_events/{kind}.u64"


def write_marks(root: Path, kind: EntityKind, raws: Iterable[bytes]) -> str:
    """Write the fingerprints of these ids; return the path of the file."""
    entity_fingerprints = np.sort(fingerprints(list(raws)))
    write_atomically(root / marks_file(kind), entity_fingerprints.astype("<u8").tobytes())
    return marks_file(kind)


def are_marked(path: Path, entity_fingerprints: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return bool [n], whether each fingerprint is in the file."""
    is_marked: NDArray[np.bool_] = np.isin(entity_fingerprints, map_file(path, "<u8"))
    return is_marked
