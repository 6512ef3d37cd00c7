"""Erased entities: what a night leaves out, by the erasures of the store."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import Conflict
from cache.store.artefacts import ArtefactStore
from cache.store.erasures import Erasure, all_erasures
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions


@dataclass(frozen=True, slots=True)
class ErasedEntities:
    """Entities that a night leaves out: those whose erasure was in force when it began."""

    users: frozenset[bytes] = frozenset()
    items: frozenset[bytes] = frozenset()
    numbers: tuple[int, ...] = ()
    _erased_texts_by_side: tuple[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        id_texts = (
            pa.array(sorted(raw_id.decode() for raw_id in raw_ids), pa.string()) for raw_ids in (self.users, self.items)
        )
        object.__setattr__(self, "_erased_texts_by_side", tuple(id_texts))

    @classmethod
    def of(cls, erasures: Iterable[Erasure]) -> "ErasedEntities":
        """Collect the entities of the erasures that are in force."""
        active_erasures = [erasure for erasure in erasures if erasure.is_in_force]
        return cls(
            frozenset(erasure.raw_id for erasure in active_erasures if erasure.kind == "user"),
            frozenset(erasure.raw_id for erasure in active_erasures if erasure.kind == "item"),
            tuple(erasure.number for erasure in active_erasures),
        )

    def digest(self, inputs_digest: str) -> str:
        """Return a digest of the sources' digest and the erased set, so that erasures change the generation's id.

        Without erasures it is the sources' digest.
        """
        if not (self.users or self.items):
            return inputs_digest
        digest_hasher = sha256(inputs_digest.encode())
        for kind, raw_ids in (("user", self.users), ("item", self.items)):
            for raw_id in sorted(raw_ids):
                digest_hasher.update(f"|{kind}:{len(raw_id)}:".encode() + raw_id)
        return digest_hasher.hexdigest()

    def leave_out(self, batch: Interactions) -> Interactions:
        """Return the interactions without those of erased users and items."""
        users, items = self._erased_texts_by_side
        if not len(users) and not len(items):
            return batch
        return batch.only(_kept_mask(batch.user_ids, users) & _kept_mask(batch.item_ids, items))

    def kept_users_mask(self, ids: Ids) -> NDArray[np.bool_]:
        """Return the mask of rows with user ids that are not erased."""
        return _kept_mask(ids, self._erased_texts_by_side[0])


NO_ERASURES = ErasedEntities()


def _kept_mask(ids: Ids, erased_texts: Any) -> NDArray[np.bool_]:
    is_kept = np.asarray(pc.invert(pc.is_in(ids.distinct_ids, value_set=erased_texts)))
    return np.asarray(is_kept[ids.id_codes], np.bool_)


def demand_unerased(store: ArtefactStore, raw_items: Collection[bytes]) -> None:
    """Raise Conflict for an item that must stay blocked because it is erased."""
    all_erased_items = ErasedEntities.of(all_erasures(store)).items if raw_items else frozenset()
    if erased_items := sorted(all_erased_items & frozenset(raw_items)):
        raise Conflict(
            f"item {erased_items[0].decode()!r} is erased, so it stays blocked; to re-admit it: "
            f"erase {erased_items[0].decode()} --as item --forget --reason ..."
        )


def describe_erased_users(store: ArtefactStore, raw_entities: Collection[bytes]) -> list[str]:
    """Describe which of the entities are erased users: they get no list even if they are not blocked."""
    erased_users = ErasedEntities.of(all_erasures(store)).users if raw_entities else frozenset()
    return [
        f"user {raw_user.decode()!r} is erased and stays so; to re-admit: erase {raw_user.decode()} --forget --reason "
        "..."
        for raw_user in sorted(erased_users & frozenset(raw_entities))
    ]
