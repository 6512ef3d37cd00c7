"""Audit log: actor, action and reason, written before the action, and its outcome, written after; append-only.

A record is two write-once files, `audit/<number>.json` and `audit/<number>.outcome`. Numbers have no gaps, so one that
is missing was removed; one without an outcome was interrupted. No record holds a token, a password or a user's id.
"""

import contextlib
import getpass
import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import orjson

from cache.errors import Conflict, LarderError, masked
from cache.store.artefacts import ArtefactStore
from cache.store.object_store import without_secrets
from cache.store.write_once import pack_files, read_files

Audited = Literal[
    "publish", "roll_back", "override", "block", "unblock", "erase", "forget", "declare_gone",
    "token_add", "token_revoke", "experiment",
]  # fmt: skip
"""Actions in the audit log: changes to the answers of all callers, to stored data, and to access."""
ACTIONS: tuple[Audited, ...] = get_args(Audited)

WRITE_TRIES = 64
TEXT_MAX = 1_000
"""Characters of a reason, a subject or an error; a longer text is cut."""

_FOLDER = "audit"
_INTENT = re.compile(r"([0-9]{12})\.json")
_FILE = re.compile(r"[0-9]{12}\.(json|outcome)")
_IDS_SHOWN = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Record of one action; times are Unix seconds.

    `outcome` is "done", "failed", "interrupted" (the program ended in between), or "missing" or "unreadable" for such
    a record.
    """

    number: int
    at: float = 0.0
    actor: str = ""
    action: str = ""
    subject: str = ""
    reason: str = ""
    attempt: str = ""
    outcome: str = "interrupted"
    ended_at: float | None = None
    error: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def audited(
    store: ArtefactStore,
    action: Audited,
    subject: str,
    *,
    actor: str = "",
    reason: str = "",
    attempt: str = "",
    clock: Callable[[], float] = time.time,
) -> Iterator[dict[str, Any]]:
    """Record the intent, run the block, then record its outcome with the findings that the block adds to the dict.

    Raises StoreError or Conflict, and the block is not run, if the intent cannot be written: nothing is done
    unrecorded. An outcome that cannot be written is a warning: the record stays, without one.
    """
    number = _begin(store, {
        "at": clock(), "actor": _text(actor or this_user()), "action": action, "subject": _text(subject),
        "reason": _text(reason), "attempt": _text(attempt),
    })  # fmt: skip
    findings: dict[str, Any] = {}
    outcome, failure_text = "failed", ""
    try:
        yield findings
        outcome = "done"
    except LarderError as error:
        failure_text = f"{error.code}: {error.message}"
        raise
    except BaseException as error:
        failure_text = f"{type(error).__name__}: {error}"
        raise
    finally:
        outcome_document = {
            "at": clock(),
            "outcome": outcome,
            "error": _text(failure_text),
            "found": findings,
        }
        try:
            store.write_once(f"{_FOLDER}/{number:012d}.outcome", _json(outcome_document))
        except LarderError as error:
            log.warning("how %s of %s ended is not in the audit log: %s", action, subject, error)


def _begin(store: ArtefactStore, fields: Mapping[str, Any]) -> int:
    number = 0
    for _ in range(WRITE_TRIES):
        # The next one after a failure, too: what a listing does not show yet is taken all the same.
        number = max(number, *_numbers(store.names(_FOLDER)), 0) + 1
        if store.write_once(f"{_FOLDER}/{number:012d}.json", _json({"number": number, **fields})):
            return number
    raise Conflict(
        f"{WRITE_TRIES} other actions were written into the audit log at once; try again"
    )


def audit_records(store: ArtefactStore) -> list[AuditRecord]:
    """Return every record, oldest first, including missing and unreadable ones."""
    file_names = frozenset(store.names(_FOLDER))
    files, loose = read_files(
        store,
        _FOLDER,
        file_names,
        [file_name for file_name in sorted(file_names) if _FILE.fullmatch(file_name)],
    )
    records = [
        _record(files, number) for number in range(1, max(_numbers(file_names), default=0) + 1)
    ]
    pack_files(store, _FOLDER, {name: files[name] for name in loose})
    return records


def entity_digest(raw: bytes) -> str:
    """Return a digest that identifies an entity's records to a reader who knows the id, and does not reveal it."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()[:16]}"


def ids_in_words(items: list[bytes], entities: list[bytes]) -> str:
    """Return the subject of a blocklist change: items by name, entities by digest, the first of many."""
    phrases = []
    for kind, ids in (
        ("items", [item.decode() for item in items]),
        ("entities", [entity_digest(entity) for entity in entities]),
    ):
        if ids:
            more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
            phrases.append(f"{kind} {', '.join(ids[:_IDS_SHOWN])}{more}")
    return "; ".join(phrases)


def this_user() -> str:
    """Return the system's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _numbers(names: Any) -> list[int]:
    return [int(intent_match[1]) for name in names if (intent_match := _INTENT.fullmatch(name))]


def _record(files: Mapping[str, bytes], number: int) -> AuditRecord:
    intent, outcome = (files.get(f"{number:012d}.{end}") for end in ("json", "outcome"))
    if intent is None:
        return AuditRecord(number, outcome="missing")
    try:
        intent_document = orjson.loads(intent)
        record = AuditRecord(number, **{name: intent_document[name] for name in _INTENT_FIELDS})
        if outcome is None:
            return record
        outcome_document = orjson.loads(outcome)
        intent_fields = {name: getattr(record, name) for name in _INTENT_FIELDS}
        return AuditRecord(
            number, **intent_fields, outcome=outcome_document["outcome"], ended_at=outcome_document["at"],
            error=outcome_document["error"], found=outcome_document["found"],
        )  # fmt: skip
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return AuditRecord(number, outcome="unreadable")


_INTENT_FIELDS = ("at", "actor", "action", "subject", "reason", "attempt")


def _text(text: str) -> str:
    """Return the text as a printable line without secrets."""
    printable_text = without_secrets(
        masked("".join(character if character.isprintable() else " " for character in text))
    )
    return (
        printable_text
        if len(printable_text) <= TEXT_MAX
        else f"{printable_text[:TEXT_MAX]}... (cut)"
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
