"""Marks: files of the entities for which events set values; their unusable rows are counted separately."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.ids import fingerprints
from cache.format.manifest import EntityKind
from cache.store.artefacts import write_atomically


def marks_file_path(kind: EntityKind) -> str:
    """Return the path, in a generation's folder, of the sorted fingerprints of the users or items with event values."""
    return f"work/set_by_events/{kind}.u64"


def write_marks(generation_folder: Path, kind: EntityKind, raw_ids: Iterable[bytes]) -> str:
    """Write the fingerprints of these ids; return the path of the file."""
    entity_fingerprints = np.sort(fingerprints(list(raw_ids)))
    write_atomically(generation_folder / marks_file_path(kind), entity_fingerprints.astype("<u8").tobytes())
    return marks_file_path(kind)


def marked_mask(marks_path: Path, entity_fingerprints: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return bool [n]: the fingerprints that are in the file."""
    is_marked: NDArray[np.bool_] = np.isin(entity_fingerprints, map_file(marks_path, "<u8"))
    return is_marked
