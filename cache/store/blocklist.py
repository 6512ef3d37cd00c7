"""Blocklist: items and entities that must not be served; takes effect within seconds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import orjson

from cache.errors import CorruptArtefact
from cache.format.ids import canonical_id
from cache.formats import BLOCKLIST, demand_readable, version_of, version_stamp
from cache.store.artefacts import ArtefactStore
from cache.store.write_once import Versioned, Versions


@dataclass(frozen=True, slots=True)
class Blocklist(Versioned):
    """Version of the blocklist: a blocked item appears in no answer, and a blocked entity gets no answer.

    `entities` may be of any kind; `users` (erased users) do not block an item of the same id. `erased_items` are
    blocked as well, and events on them do not count.
    """

    items: frozenset[bytes] = frozenset()
    entities: frozenset[bytes] = frozenset()
    users: frozenset[bytes] = frozenset()
    erased_items: frozenset[bytes] = frozenset()

    def with_all_of(self, added_blocklist: Self) -> Self:
        """Return this version combined with another namespace's blocklist."""
        return replace(
            self,
            items=self.items | added_blocklist.items,
            entities=self.entities | added_blocklist.entities,
            users=self.users | added_blocklist.users,
            erased_items=self.erased_items | added_blocklist.erased_items,
        )

    def to_bytes(self) -> bytes:
        """JSON with sorted ids."""
        return orjson.dumps(
            {
                **version_stamp(BLOCKLIST),
                "version": self.version,
                "items": sorted(raw.decode() for raw in self.items),
                "entities": sorted(raw.decode() for raw in self.entities),
                "users": sorted(raw.decode() for raw in self.users),
                "erased_items": sorted(raw.decode() for raw in self.erased_items),
            },
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )

    @classmethod
    def from_bytes(cls, blocklist_bytes: bytes) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            document = orjson.loads(blocklist_bytes)
            demand_readable(BLOCKLIST, version_of(document))
            newer_lists = (document.get(name, ()) for name in ("users", "erased_items"))
            id_lists = (document["items"], document["entities"], *newer_lists)
            return cls(
                document["version"], *(frozenset(canonical_id(raw_id) for raw_id in raw_ids) for raw_ids in id_lists)
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a blocklist: {error}") from error


BLOCKLIST_VERSIONS = Versions("blocklist", Blocklist(), Blocklist.from_bytes)


def latest_blocklist(store: ArtefactStore) -> Blocklist:
    """Return the newest version of the blocklist."""
    return BLOCKLIST_VERSIONS.latest(store)


def change_blocklist(
    store: ArtefactStore,
    *,
    block_items: Iterable[bytes] = (),
    block_entities: Iterable[bytes] = (),
    unblock_items: Iterable[bytes] = (),
    unblock_entities: Iterable[bytes] = (),
    block_users: Iterable[bytes] = (),
    unblock_users: Iterable[bytes] = (),
    erase_items: Iterable[bytes] = (),
    readmit_items: Iterable[bytes] = (),
) -> Blocklist:
    """Write the next version with the changes; a concurrent change is merged.

    `erase_items` are blocked as well. `readmit_items` are no longer erased; they stay blocked unless they are in
    `unblock_items`.
    """
    add_erased, drop_erased = frozenset(erase_items), frozenset(readmit_items)
    add_items, add_entities = frozenset(block_items) | add_erased, frozenset(block_entities)
    drop_items, drop_entities = frozenset(unblock_items), frozenset(unblock_entities)
    add_users, drop_users = frozenset(block_users), frozenset(unblock_users)

    def change(blocklist: Blocklist) -> Blocklist:
        return Blocklist(
            blocklist.version,
            blocklist.items - drop_items | add_items,
            blocklist.entities - drop_entities | add_entities,
            blocklist.users - drop_users | add_users,
            blocklist.erased_items - drop_erased | add_erased,
        )

    return BLOCKLIST_VERSIONS.change(store, change)
