"""Erasures: write-once records of entities that later nights leave out, until they are re-admitted with a reason.

A record keeps the id itself: each generation hashes ids with its own seed, so a hash would not find the entity in
existing generations or in later sources.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from cache.errors import Conflict, CorruptArtefact, LarderError
from cache.format.ids import canonical_id
from cache.format.manifest import EntityKind
from cache.formats import ERASURE, FORMAT_FIELD, demand_readable, version_of, version_stamp
from cache.store.artefacts import ArtefactStore
from cache.store.audit import AuditRecord, audit_records
from cache.store.blocklist import Blocklist, latest_blocklist
from cache.store.write_once import missing_numbers, pack_files, read_files

WRITE_TRIES_MAX = 16

_SHOWN_MAX = 5
"""Number of ids that a message names."""

LIST_TRIES = 3
"""Number of times that the records' folder is listed while a record seems to be missing."""

_PUT_BACK_ADVICE = (
    "put the file back from a copy of the store, since no erasure may be skipped; without a copy, erase its entity "
    "again with `larder erase`, which writes the missing record"
)

ERASURES_FOLDER = "erasures"

Result = TypeVar("Result")

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

    def is_blocked_by(self, blocklist: Blocklist) -> bool:
        """True if the blocklist blocks the entity as what it was erased."""
        return self.raw_id in (blocklist.users if self.kind == "user" else blocklist.items)

    @property
    def is_pending(self) -> bool:
        """True if a generation may still hold the entity."""
        return self.is_in_force and self.done_at is None


def all_erasures(store: ArtefactStore, *, accepts_lost: bool = False, should_pack: bool = True) -> list[Erasure]:
    """Return all requests, oldest first; raise CorruptArtefact for an unreadable or lost one: none may be skipped.

    `accepts_lost`: lost records are left out. `should_pack`: write a pack of records that were read one by one.
    """
    for _ in range(LIST_TRIES):
        file_names = frozenset(store.names(ERASURES_FOLDER))
        present_names = [file_name for file_name in sorted(file_names) if _FILE_NAME_PATTERN.fullmatch(file_name)]
        present_numbers = {int(file_name.partition(".")[0]) for file_name in present_names}
        numbers = sorted({*present_numbers, *missing_numbers(present_numbers)})
        # A request that is not there may be in a pack.
        content_by_name, unpacked_names = read_files(
            store, ERASURES_FOLDER, file_names, sorted({*present_names, *map(_request_name, numbers)})
        )
        lost_names = [
            _request_name(number)
            for number in numbers
            if _request_name(number) not in content_by_name and f"{number:012d}.forgotten" not in file_names
        ]
        if accepts_lost or not lost_names:
            break
        # A listing of a growing folder may show the newer of two files without the older one.
    else:
        raise CorruptArtefact(
            f"{ERASURES_FOLDER}/{lost_names[0]} in {store.url} is missing, although {present_names[-1]} is there: "
            f"{_PUT_BACK_ADVICE}"
        )
    erasures = []
    for number in numbers:
        if _request_name(number) not in content_by_name:
            continue
        erasure = _parse_erasure(content_by_name, number)
        if (closing_record := _parse_closing_record(content_by_name, number, "done", file_names)) is not None:
            erasure = replace(erasure, done_at=closing_record["at"])
        if (closing_record := _parse_closing_record(content_by_name, number, "forgotten", file_names)) is not None:
            erasure = replace(erasure, forgotten_at=closing_record["at"], reason=closing_record["reason"])
        erasures.append(erasure)
    if should_pack:
        pack_files(store, ERASURES_FOLDER, {name: content_by_name[name] for name in unpacked_names})
    return erasures


def demand_no_lost_erasure(store: ArtefactStore) -> None:
    """Raise CorruptArtefact if the store lost an erasure: one before others, or one that the audit log has."""
    _demand_audited_erasures(store, all_erasures(store), audit_records(store))


def _demand_audited_erasures(store: ArtefactStore, erasures: Sequence[Erasure], audit: Sequence[AuditRecord]) -> None:
    audited_number = _newest_audited(audit, ("erase",), "number")
    if audited_number > max((erasure.number for erasure in erasures), default=0):
        raise CorruptArtefact(
            f"{_erasure_path(audited_number, 'json')} in {store.url} is missing, although the audit log has its "
            f"erasure: {_PUT_BACK_ADVICE}"
        )


def lost_records_problems(store: ArtefactStore) -> list[str]:
    """Return why erasures, blocklist or audit log cannot be read, and which records are lost; empty if all is well."""
    problems = list[str]()
    audit = _result_or_note(lambda: audit_records(store), problems) or []
    blocklist = _result_or_note(lambda: latest_blocklist(store), problems)
    erasures = _result_or_note(lambda: all_erasures(store), problems)
    if erasures is not None:
        _result_or_note(lambda: _demand_audited_erasures(store, erasures, audit), problems)
    if blocklist is None:
        return problems
    unblocked_erasures = [
        erasure for erasure in erasures or () if erasure.is_in_force and not erasure.is_blocked_by(blocklist)
    ]
    audited_version = _newest_audited(audit, ("block", "unblock"), "version")
    if audited_version > blocklist.version:
        problems.append(
            f"the newest version of the blocklist in {store.url} is {blocklist.version}, the audit log has "
            f"{audited_version}: blocks were lost; put the folder back from a copy of the store, or block again what "
            "`larder audit` lists"
        )
    if unblocked_erasures:
        entities_text = ", ".join(f"{erasure.kind} {erasure.entity!r}" for erasure in unblocked_erasures[:_SHOWN_MAX])
        problems.append(
            f"{len(unblocked_erasures)} erased ids are not in version {blocklist.version} of the blocklist, the "
            f"newest ({entities_text}{', ...' * (len(unblocked_erasures) > _SHOWN_MAX)}): versions were lost; put the "
            "folder back from a copy of the store, or block them again with `larder erase ID` (an item: `--as item`)"
        )
    return problems


def _result_or_note(call: Callable[[], Result], problems: list[str]) -> Result | None:
    """Return a call's result; if it raises a LarderError, add its message to the problems and return None."""
    try:
        return call()
    except LarderError as error:
        problems.append(error.message)
        return None


def _newest_audited(audit: Sequence[AuditRecord], actions: Collection[str], finding_name: str) -> int:
    """Return the largest number that these actions noted in the audit log under this name; 0 without one."""
    findings = [record.found.get(finding_name) for record in audit if record.action in actions]
    return max((finding for finding in findings if isinstance(finding, int)), default=0)


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
        erasures = all_erasures(store, accepts_lost=True) if existing_erasures is None else existing_erasures
        if (existing_erasure := find_erasure(erasures, raw_id, kind)) is not None:
            return existing_erasure
        known_numbers = {erasure.number for erasure in erasures}
        number = next(number for number in range(1, len(known_numbers) + 2) if number not in known_numbers)
        _remove_closing_records(store, number)
        new_erasure = Erasure(number, raw_id.decode(), kind, requested_at, was_blocked)
        field_names = ("number", "entity", "kind", "at", "was_blocked")
        body = _to_json_bytes({name: getattr(new_erasure, name) for name in field_names} | version_stamp(ERASURE))
        if store.write_once(_erasure_path(number, "json"), body):
            return new_erasure
        existing_erasures = None
    raise Conflict(f"{WRITE_TRIES_MAX} other erasures were being written at the same time; try again")


def _remove_closing_records(store: ArtefactStore, erasure_number: int) -> None:
    """Remove the closing records of a lost request, which would close the one that takes its number."""
    file_names = store.names(ERASURES_FOLDER)
    for path in (_erasure_path(erasure_number, suffix) for suffix in ("done", "forgotten")):
        if path.removeprefix(f"{ERASURES_FOLDER}/") in file_names:
            store.delete(path)


def mark_done(store: ArtefactStore, erasure: Erasure, *, done_at: float) -> Erasure:
    """Record that no generation holds the entity any more; return the updated erasure."""
    store.write_once(_erasure_path(erasure.number, "done"), _to_json_bytes({"at": done_at}))
    return replace(erasure, done_at=done_at)


def mark_forgotten(store: ArtefactStore, erasure: Erasure, *, forgotten_at: float, reason: str) -> None:
    """Re-admit the entity to later nights."""
    store.write_once(_erasure_path(erasure.number, "forgotten"), _to_json_bytes({"at": forgotten_at, "reason": reason}))


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


def _request_name(erasure_number: int) -> str:
    return f"{erasure_number:012d}.json"


def _erasure_path(erasure_number: int, file_suffix: str) -> str:
    return f"{ERASURES_FOLDER}/{erasure_number:012d}.{file_suffix}"
