"""Chunk: some users of a shard on their way from the partition to the pages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.topk.flat import Top
from precompute.reuse.copied import CopiedUsers
from precompute.sources.unusable import Case, UnusableRows


@dataclass(slots=True, eq=False)
class Chunk:
    """Some users in hash order on their way from the partition to the pages."""

    ids: Any
    """Arrow strings."""
    hashes: NDArray[np.uint64]
    histories: Histories
    features: Mapping[str, Mapping[str, NDArray[Any]]]
    usable: Mapping[str, NDArray[np.bool_]]
    """Users with every input of each model; the others get no answer of it."""
    seen_items: Histories
    copied: CopiedUsers
    """Places of these users among all of their hash range, and of those whose records are copied."""
    entities: int = 0
    """Entities of the shard up to the end of this chunk, those without input included."""
    total: int = 0
    """Entities of the shard: exact with its last slice, estimated before."""
    vectors: NDArray[np.float32] | None = None
    """[users, dims]: vectors that the night was given, a row of NaN for who brings none."""
    times: Histories | None = None
    """Times of the items that they had, when each happened last; None where no events are taken in."""
    feature_json: Histories | None = None
    """JSON of what the user tower is given besides; None where that is nothing, or not published."""
    has_own_vector: NDArray[np.bool_] | None = None
    """Users who brought a vector along, bool [users]; None where that is not published."""
    fingerprints: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    outputs: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    answered: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Users whose output of each model is finite."""
    lists: dict[str, Top] = field(default_factory=dict)
    records: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Records of all users of the chunk's range by table, copied ones among them, in hash order."""
    short: int = 0
    """Lists with fewer items than they could have."""
    unusable: UnusableRows = field(default_factory=UnusableRows)
    """Rows that cannot be used: chunks are worked on side by side, and reports name the first in hash order."""

    def case(self, row: int) -> Case:
        """Name of a user as a report gives it."""
        return {"user": self.ids[row].as_py()}

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Lets the users of a mask go, whose records are copied after all."""
        remaining_rows = np.flatnonzero(~stay_mask)
        self.copied.stay(stay_mask)
        self.ids = self.ids.take(pa.array(remaining_rows))
        self.hashes, self.fingerprints = (
            self.hashes[remaining_rows],
            self.fingerprints[remaining_rows],
        )
        self.histories, self.seen_items = (
            self.histories.select_rows(remaining_rows),
            self.seen_items.select_rows(remaining_rows),
        )
        self.times = None if self.times is None else self.times.select_rows(remaining_rows)
        self.feature_json = (
            None if self.feature_json is None else self.feature_json.select_rows(remaining_rows)
        )
        self.has_own_vector = (
            None if self.has_own_vector is None else self.has_own_vector[remaining_rows]
        )
        self.usable = {name: mask[remaining_rows] for name, mask in self.usable.items()}
        self.features = {
            model: {name: column[remaining_rows] for name, column in columns.items()}
            for model, columns in self.features.items()
        }
        self.outputs = {name: outputs[remaining_rows] for name, outputs in self.outputs.items()}
        self.answered = {name: mask[remaining_rows] for name, mask in self.answered.items()}
        if self.vectors is not None:
            self.vectors = self.vectors[remaining_rows]

    def use_vectors(self) -> None:
        """Puts the vectors that the night was given in the place of the user tower's outputs."""
        if self.vectors is None:
            return
        has_vector = ~np.isnan(self.vectors[:, 0])
        tower_outputs = self.outputs["user_tower"]
        self.outputs["user_tower"] = np.where(has_vector[:, None], self.vectors, tower_outputs)
        self.answered["user_tower"] |= has_vector
        self.vectors = None
