"""Erasures: whose data no later night may hold, written down once; in force until re-admitted with a reason.

A record keeps the id itself: each generation hashes with a seed of its own, so nothing less would find the entity in
the generations that still hold it, nor in the sources of later nights.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import Conflict, CorruptArtefact
from cache.format.ids import canonical_id
from cache.format.manifest import EntityKind
from cache.formats import ERASURE, FIELD, demand, stamp, version_of
from cache.store.artefacts import ArtefactStore
from cache.store.packs import pack, read_files
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions

WRITE_TRIES = 16
FOLDER = "erasures"

_REQUEST = re.compile(r"([0-9]{12})\.json")
_FILE = re.compile(r"[0-9]{12}\.(json|done|forgotten)")


@dataclass(frozen=True, slots=True)
class Erasure:
    """Erasure request; times are Unix seconds, `was_blocked` says that the id was on the blocklist already."""

    number: int
    entity: str
    kind: EntityKind
    at: float
    was_blocked: bool = False
    done_at: float | None = None
    forgotten_at: float | None = None
    reason: str = ""

    @property
    def raw(self) -> bytes:
        """The id as records know it."""
        return self.entity.encode()

    @property
    def is_in_force(self) -> bool:
        """True if nights leave the entity out."""
        return self.forgotten_at is None

    @property
    def is_pending(self) -> bool:
        """True if a generation may still hold the entity."""
        return self.is_in_force and self.done_at is None


@dataclass(frozen=True, slots=True)
class Erased:
    """Entities that a night leaves out: the erasures in force when it began."""

    users: frozenset[bytes] = frozenset()
    items: frozenset[bytes] = frozenset()
    numbers: tuple[int, ...] = ()
    _texts: tuple[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        texts = (
            pa.array(sorted(raw.decode() for raw in each), pa.string())
            for each in (self.users, self.items)
        )
        object.__setattr__(self, "_texts", tuple(texts))

    @classmethod
    def of(cls, erasures: Iterable[Erasure]) -> "Erased":
        """Erased entities of the erasures that are in force."""
        ours = [each for each in erasures if each.is_in_force]
        return cls(
            frozenset(each.raw for each in ours if each.kind == "user"),
            frozenset(each.raw for each in ours if each.kind == "item"),
            tuple(each.number for each in ours),
        )

    def digest(self, inputs_digest: str) -> str:
        """Digest of the sources without what is erased: another set makes another generation; none changes nothing."""
        if not (self.users or self.items):
            return inputs_digest
        whole = sha256(inputs_digest.encode())
        for kind, ids in (("user", self.users), ("item", self.items)):
            for raw in sorted(ids):
                whole.update(f"|{kind}:{len(raw)}:".encode() + raw)
        return whole.hexdigest()

    def leave_out(self, batch: Interactions) -> Interactions:
        """The interactions of everybody else, with everything else."""
        users, items = self._texts
        if not len(users) and not len(items):
            return batch
        return batch.only(_keeps(batch.users, users) & _keeps(batch.items, items))

    def keeps_users(self, ids: Ids) -> NDArray[np.bool_]:
        """Mask of the rows of a column of user ids that stay."""
        return _keeps(ids, self._texts[0])


NOBODY = Erased()


def _keeps(ids: Ids, erased: Any) -> NDArray[np.bool_]:
    kept = np.asarray(pc.invert(pc.is_in(ids.names, value_set=erased)))
    return np.asarray(kept[ids.codes], np.bool_)


def all_erasures(store: ArtefactStore) -> list[Erasure]:
    """Every request, oldest first; raises CorruptArtefact for one that cannot be read: nobody may slip through."""
    listed = frozenset(store.names(FOLDER))
    files, loose = read_files(
        store, FOLDER, listed, [each for each in sorted(listed) if _FILE.fullmatch(each)]
    )
    found = []
    for number in sorted(int(each[1]) for name in listed if (each := _REQUEST.fullmatch(name))):
        erasure = _read(files, number)
        if (mark := _mark(files, number, "done", listed)) is not None:
            erasure = replace(erasure, done_at=mark["at"])
        if (mark := _mark(files, number, "forgotten", listed)) is not None:
            erasure = replace(erasure, forgotten_at=mark["at"], reason=mark["reason"])
        found.append(erasure)
    pack(store, FOLDER, {name: files[name] for name in loose})
    return found


def find_erasure(erasures: Iterable[Erasure], raw: bytes, kind: EntityKind) -> Erasure | None:
    """Erasure in force for an entity, None if there is none."""
    ours = (each for each in erasures if each.raw == raw and each.kind == kind)
    return next((each for each in ours if each.is_in_force), None)


def request(
    store: ArtefactStore,
    raw: bytes,
    kind: EntityKind,
    *,
    at: float,
    was_blocked: bool = False,
    known: Sequence[Erasure] | None = None,
) -> Erasure:
    """Write a request down; one that is in force already is found, not doubled. `known`: what was just read."""
    for _ in range(WRITE_TRIES):
        erasures = all_erasures(store) if known is None else known
        if (found := find_erasure(erasures, raw, kind)) is not None:
            return found
        number = max((each.number for each in erasures), default=0) + 1
        asked = Erasure(number, raw.decode(), kind, at, was_blocked)
        fields = ("number", "entity", "kind", "at", "was_blocked")
        body = _json({name: getattr(asked, name) for name in fields} | stamp(ERASURE))
        if store.write_once(_path(number, "json"), body):
            return asked
        known = None
    raise Conflict(f"{WRITE_TRIES} other erasures were being written at the same time; try again")


def mark_done(store: ArtefactStore, erasure: Erasure, *, at: float) -> Erasure:
    """Records that no generation holds the entity any more; returns the erasure as it now stands."""
    store.write_once(_path(erasure.number, "done"), _json({"at": at}))
    return replace(erasure, done_at=at)


def mark_forgotten(store: ArtefactStore, erasure: Erasure, *, at: float, reason: str) -> None:
    """Let the entity into later nights again."""
    store.write_once(_path(erasure.number, "forgotten"), _json({"at": at, "reason": reason}))


def demand_unerased(store: ArtefactStore, items: Collection[bytes]) -> None:
    """Raises Conflict for an item that an erasure keeps blocked."""
    erased = Erased.of(all_erasures(store)).items if items else frozenset()
    if found := sorted(erased & frozenset(items)):
        raise Conflict(
            f"item {found[0].decode()!r} is erased, so it stays blocked; to re-admit it: "
            f"erase {found[0].decode()} --as item --forget --reason ..."
        )


def _read(files: Mapping[str, bytes], number: int) -> Erasure:
    data = _load(files, _path(number, "json"))
    try:
        demand(ERASURE, version_of(data), _path(number, "json"))
        data.pop(FIELD, None)
        canonical_id(data["entity"])
        if data["number"] != number or data["kind"] not in ("user", "item"):
            raise ValueError("number or kind do not fit")
        return Erasure(**data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArtefact(f"{_path(number, 'json')} is no erasure: {error}") from error


def _mark(
    files: Mapping[str, bytes], number: int, what: str, listed: Collection[str]
) -> dict[str, Any] | None:
    path = _path(number, what)
    is_there = path.removeprefix(f"{FOLDER}/") in listed
    return {"at": 0.0, "reason": "", **_load(files, path)} if is_there else None


def _load(files: Mapping[str, bytes], path: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(files.get(path.removeprefix(f"{FOLDER}/"), b""))
    except orjson.JSONDecodeError as error:
        raise CorruptArtefact(f"{path} cannot be read: {error}") from error
    return found


def _json(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _path(number: int, kind: str) -> str:
    return f"{FOLDER}/{number:012d}.{kind}"
