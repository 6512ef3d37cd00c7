"""Audit log: actor, action and reason, written before the action, and its outcome, written afterwards; append-only.

A record consists of two write-once files, `audit/<number>.json` and `audit/<number>.outcome`. Numbers have no gaps, so
that a missing number shows a removed record; a record without an outcome was interrupted. No record contains a token, a
password or a user's id.
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

from cache.errors import Conflict, LarderError, mask_secrets
from cache.store.artefacts import ArtefactStore
from cache.store.object_store import without_secrets
from cache.store.write_once import missing_numbers, pack_files, read_files

AuditedAction = Literal[
    "publish", "roll_back", "adopt", "override", "block", "unblock", "erase", "forget", "declare_gone",
    "token_add", "token_revoke", "experiment", "canary_abandon",
]  # fmt: skip
"""Actions in the audit log: changes to the answers of all callers, to stored data, and to access."""
ACTIONS: tuple[AuditedAction, ...] = get_args(AuditedAction)

WRITE_TRIES_MAX = 64
TEXT_CHARS_MAX = 1_000
"""Largest number of characters of a reason, a subject or an error; longer texts are truncated."""

_AUDIT_FOLDER = "audit"
_INTENT_FILE_PATTERN = re.compile(r"([0-9]{12})\.json")
_AUDIT_FILE_PATTERN = re.compile(r"[0-9]{12}\.(json|outcome)")
_SHOWN_IDS_MAX = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Record of one action; times are Unix seconds.

    `outcome` is "done", "failed", "interrupted" (the program ended during the action), or "missing" or "unreadable" for
    such a record.
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
    action: AuditedAction,
    subject: str,
    *,
    actor: str = "",
    reason: str = "",
    attempt: str = "",
    wall_clock: Callable[[], float] = time.time,
) -> Iterator[dict[str, Any]]:
    """Record the intent, run the block, then record its outcome with the findings that the block adds to the dict.

    Raises StoreError or Conflict without running the block if the intent cannot be written, so that no action is
    unrecorded. If the outcome cannot be written, logs a warning, and the record stays without an outcome.
    """
    number = _write_intent(store, {
        "at": wall_clock(), "actor": _printable_text(actor or user_and_host()), "action": action,
        "subject": _printable_text(subject),
        "reason": _printable_text(reason), "attempt": _printable_text(attempt),
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
            "at": wall_clock(),
            "outcome": outcome,
            "error": _printable_text(failure_text),
            "found": findings,
        }
        try:
            store.write_once(f"{_AUDIT_FOLDER}/{number:012d}.outcome", _json_bytes(outcome_document))
        except LarderError as error:
            log.warning("cannot write the outcome of %s of %s to the audit log: %s", action, subject, error)


def _write_intent(store: ArtefactStore, intent_fields: Mapping[str, Any]) -> int:
    number = 0
    for _ in range(WRITE_TRIES_MAX):
        # Also go on to the next number after a failure: a number may be taken although the listing does not show it
        # yet.
        number = max(number, *_record_numbers(store.names(_AUDIT_FOLDER)), 0) + 1
        if store.write_once(f"{_AUDIT_FOLDER}/{number:012d}.json", _json_bytes({"number": number, **intent_fields})):
            return number
    raise Conflict(f"{WRITE_TRIES_MAX} other actions were written to the audit log at the same time; try again")


def audit_records(store: ArtefactStore) -> list[AuditRecord]:
    """Return every record, oldest first, including missing and unreadable ones."""
    file_names = frozenset(store.names(_AUDIT_FOLDER))
    content_by_name, unpacked_names = read_files(
        store,
        _AUDIT_FOLDER,
        file_names,
        [file_name for file_name in sorted(file_names) if _AUDIT_FILE_PATTERN.fullmatch(file_name)],
    )
    recorded_numbers = set(_record_numbers(file_names))
    all_numbers = sorted({*recorded_numbers, *missing_numbers(recorded_numbers)})
    records = [_parse_record(content_by_name, number) for number in all_numbers]
    pack_files(store, _AUDIT_FOLDER, {name: content_by_name[name] for name in unpacked_names})
    return records


def entity_digest(raw_id: bytes) -> str:
    """Return a digest that identifies an entity's records to a reader who knows the id, and does not reveal it."""
    return f"sha256:{hashlib.sha256(raw_id).hexdigest()[:16]}"


def describe_blocked_ids(item_ids: list[bytes], entity_ids: list[bytes]) -> str:
    """Return the subject of a blocklist change: items by name, entities by digest; only the first of many."""
    phrases = []
    for kind, ids in (
        ("items", [item.decode() for item in item_ids]),
        ("entities", [entity_digest(entity) for entity in entity_ids]),
    ):
        if ids:
            more_words = f" and {len(ids) - _SHOWN_IDS_MAX} more" if len(ids) > _SHOWN_IDS_MAX else ""
            phrases.append(f"{kind} {', '.join(ids[:_SHOWN_IDS_MAX])}{more_words}")
    return "; ".join(phrases)


def user_and_host() -> str:
    """Return the system's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _record_numbers(file_names: Any) -> list[int]:
    return [
        int(intent_match[1]) for file_name in file_names if (intent_match := _INTENT_FILE_PATTERN.fullmatch(file_name))
    ]


def _parse_record(content_by_name: Mapping[str, bytes], number: int) -> AuditRecord:
    intent_bytes, outcome_bytes = (content_by_name.get(f"{number:012d}.{suffix}") for suffix in ("json", "outcome"))
    if intent_bytes is None:
        return AuditRecord(number, outcome="missing")
    try:
        intent_document = orjson.loads(intent_bytes)
        record = AuditRecord(number, **{name: intent_document[name] for name in _INTENT_FIELDS})
        if outcome_bytes is None:
            return record
        outcome_document = orjson.loads(outcome_bytes)
        intent_fields = {name: getattr(record, name) for name in _INTENT_FIELDS}
        return AuditRecord(
            number, **intent_fields, outcome=outcome_document["outcome"], ended_at=outcome_document["at"],
            error=outcome_document["error"], found=outcome_document["found"],
        )  # fmt: skip
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return AuditRecord(number, outcome="unreadable")


_INTENT_FIELDS = ("at", "actor", "action", "subject", "reason", "attempt")


def _printable_text(text: str) -> str:
    """Return the text as one printable line without secrets."""
    printable_text = without_secrets(
        mask_secrets("".join(character if character.isprintable() else " " for character in text))
    )
    return printable_text if len(printable_text) <= TEXT_CHARS_MAX else f"{printable_text[:TEXT_CHARS_MAX]}... (cut)"


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
