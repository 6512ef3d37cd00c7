"""Erasures: entities that later nights must leave out, until they are re-admitted with a reason.

A record keeps the id itself: each generation hashes ids with its own seed, so a hash would not find the entity in
existing generations or in later sources.
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
from cache.formats import ERASURE, FORMAT_FIELD, demand_readable, version_of, version_stamp
from cache.store.artefacts import ArtefactStore
from cache.store.write_once import pack_files, read_files
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions

WRITE_TRIES_MAX = 16
_PUT_BACK_ADVICE = "put the file back from a copy of the store, since no erasure may be skipped"

ERASURES_FOLDER = "erasures"

_REQUEST_NAME_PATTERN = re.compile(r"([0-9]{12})\.json")
_FILE_NAME_PATTERN = re.compile(r"[0-9]{12}\.(json|done|forgotten)")


@dataclass(frozen=True, slots=True)
class Erasure:
    """Erasure request; times are in Unix seconds. `was_blocked`: the id was already on the blocklist."""

    number: int
    entity: str
    kind: EntityKind
    at: float
    was_blocked: bool = False
    done_at: float | None = None
    forgotten_at: float | None = None
    reason: str = ""

    @property
    def raw_id(self) -> bytes:
        """Id in the form of records."""
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


def all_erasures(store: ArtefactStore) -> list[Erasure]:
    """Return all requests, oldest first; raise CorruptArtefact for an unreadable one, since none may be skipped."""
    file_names = frozenset(store.names(ERASURES_FOLDER))
    content_by_name, unpacked_names = read_files(
        store,
        ERASURES_FOLDER,
        file_names,
        [file_name for file_name in sorted(file_names) if _FILE_NAME_PATTERN.fullmatch(file_name)],
    )
    erasures = []
    for number in sorted(
        int(request_match[1]) for name in file_names if (request_match := _REQUEST_NAME_PATTERN.fullmatch(name))
    ):
        erasure = _parse_erasure(content_by_name, number)
        if (closing_record := _parse_closing_record(content_by_name, number, "done", file_names)) is not None:
            erasure = replace(erasure, done_at=closing_record["at"])
        if (closing_record := _parse_closing_record(content_by_name, number, "forgotten", file_names)) is not None:
            erasure = replace(erasure, forgotten_at=closing_record["at"], reason=closing_record["reason"])
        erasures.append(erasure)
    pack_files(store, ERASURES_FOLDER, {name: content_by_name[name] for name in unpacked_names})
    return erasures


def find_erasure(erasures: Iterable[Erasure], raw_id: bytes, kind: EntityKind) -> Erasure | None:
    """Return the erasure in force for an entity, None if there is none."""
    entity_erasures = (erasure for erasure in erasures if erasure.raw_id == raw_id and erasure.kind == kind)
    return next((erasure for erasure in entity_erasures if erasure.is_in_force), None)


def request_erasure(
    store: ArtefactStore,
    raw_id: bytes,
    kind: EntityKind,
    *,
    requested_at: float,
    was_blocked: bool = False,
    existing_erasures: Sequence[Erasure] | None = None,
) -> Erasure:
    """Record a request, unless one is in force. `existing_erasures` must have just been read."""
    for _ in range(WRITE_TRIES_MAX):
        erasures = all_erasures(store) if existing_erasures is None else existing_erasures
        if (existing_erasure := find_erasure(erasures, raw_id, kind)) is not None:
            return existing_erasure
        number = max((erasure.number for erasure in erasures), default=0) + 1
        new_erasure = Erasure(number, raw_id.decode(), kind, requested_at, was_blocked)
        field_names = ("number", "entity", "kind", "at", "was_blocked")
        body = _to_json_bytes({name: getattr(new_erasure, name) for name in field_names} | version_stamp(ERASURE))
        if store.write_once(_erasure_path(number, "json"), body):
            return new_erasure
        existing_erasures = None
    raise Conflict(f"{WRITE_TRIES_MAX} other erasures were being written at the same time; try again")


def mark_done(store: ArtefactStore, erasure: Erasure, *, done_at: float) -> Erasure:
    """Record that no generation holds the entity any more; return the updated erasure."""
    store.write_once(_erasure_path(erasure.number, "done"), _to_json_bytes({"at": done_at}))
    return replace(erasure, done_at=done_at)


def mark_forgotten(store: ArtefactStore, erasure: Erasure, *, forgotten_at: float, reason: str) -> None:
    """Re-admit the entity to later nights."""
    store.write_once(_erasure_path(erasure.number, "forgotten"), _to_json_bytes({"at": forgotten_at, "reason": reason}))


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


def _parse_erasure(content_by_name: Mapping[str, bytes], erasure_number: int) -> Erasure:
    document = _parse_json_file(content_by_name, _erasure_path(erasure_number, "json"))
    try:
        demand_readable(ERASURE, version_of(document), _erasure_path(erasure_number, "json"))
        document.pop(FORMAT_FIELD, None)
        canonical_id(document["entity"])
        if document["number"] != erasure_number or document["kind"] not in ("user", "item"):
            raise ValueError("number or kind does not match")
        return Erasure(**document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArtefact(
            f"{_erasure_path(erasure_number, 'json')} is not an erasure ({error}): {_PUT_BACK_ADVICE}"
        ) from error


def _parse_closing_record(
    content_by_name: Mapping[str, bytes], erasure_number: int, suffix: str, file_names: Collection[str]
) -> dict[str, Any] | None:
    path = _erasure_path(erasure_number, suffix)
    is_recorded = path.removeprefix(f"{ERASURES_FOLDER}/") in file_names
    return {"at": 0.0, "reason": "", **_parse_json_file(content_by_name, path)} if is_recorded else None


def _parse_json_file(content_by_name: Mapping[str, bytes], path: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = orjson.loads(content_by_name.get(path.removeprefix(f"{ERASURES_FOLDER}/"), b""))
    except orjson.JSONDecodeError as error:
        raise CorruptArtefact(f"{path} cannot be read ({error}): {_PUT_BACK_ADVICE}") from error
    return document


def _to_json_bytes(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _erasure_path(erasure_number: int, file_suffix: str) -> str:
    return f"{ERASURES_FOLDER}/{erasure_number:012d}.{file_suffix}"
