"""Default lists of a generation's top-K tables: what holds for everybody."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class DefaultList:
    """Default list of a top-K table when nothing better exists: ordinals and scores, best first."""

    items: NDArray[np.uint32]
    scores: NDArray[np.float32]
    ordinals: Mapping[bytes, int]
    """Ordinals of the items, by their ids."""

    def among(self, raws: Iterable[bytes] | None) -> frozenset[int]:
        """The ordinals of those of the ids that stand in it."""
        ordinals = self.ordinals
        return frozenset([ordinals[raw] for raw in raws or () if raw in ordinals])


def read_defaults(manifest: Manifest, root: Path, items: ItemTable) -> dict[str, DefaultList]:
    """Defaults of a generation by table; raises CorruptArtefact where they do not fit its items.

    Tables of items have none: what is popular suits somebody of whom nothing is known, but is like no item.
    """
    raw = (root / manifest.defaults.path).read_bytes()
    try:
        document = orjson.loads(raw)
        defaults = {}
        for name, default_list in document.items():
            if name in manifest.tables and manifest.tables[name].entity == "item":
                continue
            raws = [id_.encode() for id_ in default_list["items"]]
            ordinals = items.ordinals_of(raws)
            if (ordinals < 0).any() or len(ordinals) != len(default_list["scores"]):
                raise CorruptArtefact(f"the defaults of {name} do not fit the item table")
            defaults[name] = DefaultList(
                ordinals.astype(np.uint32),
                np.array(default_list["scores"], np.float32),
                dict(zip(raws, ordinals.tolist(), strict=True)),
            )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtefact(f"{manifest.defaults.path} cannot be read: {error}") from error
    return defaults
