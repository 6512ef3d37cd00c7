"""The blocklist: items and entities that must not be served, effective within seconds."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import orjson

from cache.errors import Conflict, CorruptArtefact
from cache.format.ids import canonical_id
from cache.formats import BLOCKLIST, demand, stamp, version_of
from cache.store.artefacts import ArtefactStore

WRITE_TRIES = 16

# Whatever else somebody leaves in the folder (notes, an editor's copy) is no version.
_VERSION = re.compile(r"([0-9]{12})\.json")


@dataclass(frozen=True, slots=True)
class Blocklist:
    """Version of the blocklist; a blocked item appears in no answer, a blocked entity gets none of its own.

    `entities` are of whatever kind; `users` (the erased ones) leave an item of the same id alone.
    """

    version: int = 0
    items: frozenset[bytes] = frozenset()
    entities: frozenset[bytes] = frozenset()
    users: frozenset[bytes] = frozenset()

    def with_all_of(self, other: Self) -> Self:
        """This version, with what another namespace blocks."""
        return replace(
            self,
            items=self.items | other.items,
            entities=self.entities | other.entities,
            users=self.users | other.users,
        )

    def to_bytes(self) -> bytes:
        """JSON with sorted ids."""
        return orjson.dumps(
            {
                **stamp(BLOCKLIST),
                "version": self.version,
                "items": sorted(raw.decode() for raw in self.items),
                "entities": sorted(raw.decode() for raw in self.entities),
                "users": sorted(raw.decode() for raw in self.users),
            },
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            data = orjson.loads(raw)
            demand(BLOCKLIST, version_of(data))
            ids = (data["items"], data["entities"], data.get("users", ()))
            return cls(
                data["version"],
                *(frozenset(canonical_id(each) for each in found) for found in ids),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a blocklist: {error}") from error


def newest_version(store: ArtefactStore) -> int:
    """The version in force, 0 when nothing was ever blocked; one listing, so cheap to poll."""
    names = store.names("blocklist")
    return max((int(found[1]) for name in names if (found := _VERSION.fullmatch(name))), default=0)


def latest_blocklist(store: ArtefactStore) -> Blocklist:
    """The blocklist in force."""
    version = newest_version(store)
    raw = store.read(_path(version)) if version else None
    return Blocklist() if raw is None else Blocklist.from_bytes(raw)


def change_blocklist(
    store: ArtefactStore,
    *,
    block_items: Iterable[bytes] = (),
    block_entities: Iterable[bytes] = (),
    unblock_items: Iterable[bytes] = (),
    unblock_entities: Iterable[bytes] = (),
    block_users: Iterable[bytes] = (),
    unblock_users: Iterable[bytes] = (),
) -> Blocklist:
    """Write the next version; a concurrent change is merged, never lost."""
    add_items, add_entities = frozenset(block_items), frozenset(block_entities)
    drop_items, drop_entities = frozenset(unblock_items), frozenset(unblock_entities)
    add_users, drop_users = frozenset(block_users), frozenset(unblock_users)
    for _ in range(WRITE_TRIES):
        now = latest_blocklist(store)
        changed = Blocklist(
            now.version + 1,
            now.items - drop_items | add_items,
            now.entities - drop_entities | add_entities,
            now.users - drop_users | add_users,
        )
        if replace(changed, version=now.version) == now:
            return now
        if store.write_once(_path(changed.version), changed.to_bytes()):
            return changed
    raise Conflict(
        f"the blocklist changed {WRITE_TRIES} times while it was being written; try again"
    )


def _path(version: int) -> str:
    return f"blocklist/{version:012d}.json"
