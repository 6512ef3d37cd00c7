"""Tokens file: names, hashes, scopes, quotas and expiry of tokens, without the tokens themselves.

A token is 256 random bits, so its plain SHA-256 can be neither reversed nor guessed: a slow hash protects passwords,
which people choose.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from cache.config.section import section
from cache.errors import ConfigError
from cache.store.artefacts import open_draft
from serving.access.quota import QuotaLimits

Scope = Literal["read", "score", "feedback", "events", "explain", "admin"]

SCOPES: Mapping[Scope, str] = {
    "read": "lookups, and which generations are served",
    "score": "candidates put in order",
    "feedback": "reports of what came of answers",
    "events": "events of users and items, taken in",
    "explain": "why an entity is answered as it is",
    "admin": "the dashboard's data",
}
"""Meaning by scope; `/healthz`, `/readyz`, `/metrics`, the dashboard's page and the documentation need none."""

DEFAULT_NAME = "default"
"""Name of the token in `LARDER_TOKEN`; no token of the file may have it."""

TOKENS_MAX = 256
FILE_BYTES_MAX = 1 << 20
FILE_VERSION = 1
_TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@section
class TokenEntry:
    """Entry of one token; the file has it under the token's name."""

    sha256: str
    """SHA-256 of the token, in hex."""
    scopes: tuple[str, ...]
    """Scopes that the token has."""
    expires_at: str = ""
    """Time of expiry, ISO 8601 with its offset from UTC; empty: never."""
    requests_per_s: Annotated[float | None, Field(gt=0)] = None
    """Requests a second, over all workers of the service."""
    entities_per_s: Annotated[float | None, Field(gt=0)] = None
    """Entities a second."""
    in_flight: Annotated[int | None, Field(ge=1)] = None
    """Requests in flight at once."""
    created_at: str = ""
    """Time of creation."""

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.sha256):
            raise ConfigError(  # not the value itself: it may be a token
                "sha256 must be 64 hex digits in lower case, as `larder tokens add` writes them",
                field="sha256",
            )
        for scope in self.scopes:
            if scope not in SCOPES:
                raise ConfigError(
                    f"scopes must be of {', '.join(SCOPES)}, not {scope!r}", field="scopes"
                )
        if not self.scopes:
            raise ConfigError(
                f"scopes must name at least one of {', '.join(SCOPES)}", field="scopes"
            )
        for name in ("expires_at", "created_at"):
            parse_moment(getattr(self, name), name)

    @property
    def expires_s(self) -> float:
        """Unix seconds of expiry; infinite: never."""
        return parse_moment(self.expires_at, "expires_at")

    @property
    def limits(self) -> QuotaLimits:
        """Quotas of the token."""
        return QuotaLimits(self.requests_per_s, self.entities_per_s, self.in_flight)


Tokens = Mapping[str, TokenEntry]


def read_tokens(path: Path) -> Tokens:
    """Read the file's entries by name; raise ConfigError, naming file, token, field, value and allowed values."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        remedy = "`larder tokens add NAME` makes it"
        if isinstance(error, PermissionError):
            remedy = "give it an owner, or a group and mode 0640, with which the service's user may read it"
        raise ConfigError(
            f"cannot read tokens file {path}: {error.strerror}; {remedy}", field="tokens_file"
        ) from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"tokens file {path} is larger than {FILE_BYTES_MAX:,} bytes")
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"tokens file {path} is no JSON: {error}") from None
    if not isinstance(document, dict) or document.keys() != {"version", "tokens"}:
        raise ConfigError(
            f"tokens file {path} must be an object of `version` and `tokens`, nothing else"
        )
    if document["version"] != FILE_VERSION:
        raise ConfigError(
            f"tokens file {path}: version must be {FILE_VERSION}, not {document['version']!r:.40}"
        )
    raw_entries = document["tokens"]
    if not isinstance(raw_entries, dict) or len(raw_entries) > TOKENS_MAX:
        raise ConfigError(
            f"tokens file {path}: tokens must be an object of at most {TOKENS_MAX} names"
        )
    tokens = {name: _entry(path, name, raw_entry) for name, raw_entry in raw_entries.items()}
    names: dict[str, str] = {}
    for name, entry in tokens.items():
        if (earlier_name := names.setdefault(entry.sha256, name)) != name:
            raise ConfigError(f"tokens file {path}: {earlier_name} and {name} have the same sha256")
    return tokens


def _entry(path: Path, name: str, fields: Any) -> TokenEntry:
    where = f"tokens file {path}: token {name[:64]!r}"
    check_token_name(name, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be an object of settings")
    settings: dict[str, Any] = {
        field_name: tuple(value) if isinstance(value, list) else value
        for field_name, value in fields.items()
    }
    try:
        return TokenEntry(**settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", **error.details) from None


def check_token_name(name: str, where: str) -> None:
    """Raise ConfigError unless a token of the file may have this name."""
    if name == DEFAULT_NAME:
        raise ConfigError(f"{where}: {DEFAULT_NAME!r} is the name of LARDER_TOKEN", field="name")
    if not _TOKEN_NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name has 1 to 64 letters, digits, dots, hyphens or underscores, and begins with a letter or "
            "digit",
            field="name",
        )


def write_tokens(path: Path, tokens: Tokens) -> None:
    """Replace the file atomically, with owner, group and mode of before; a new one is readable by its owner only.

    Raises ConfigError for more tokens than it may hold, and if this user cannot give it back to its owner and group.
    """
    if len(tokens) > TOKENS_MAX:
        raise ConfigError(f"tokens file {path} holds at most {TOKENS_MAX} tokens: revoke some")
    fields_by_name = {name: _entry_to_json(entry) for name, entry in sorted(tokens.items())}
    body = orjson.dumps(
        {"version": FILE_VERSION, "tokens": fields_by_name},
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    with open_draft(path) as temporary_path:
        temporary_path.touch(mode=0o600)
        temporary_path.write_bytes(body)
        if path.exists():
            _copy_owner(path, temporary_path)


def _copy_owner(path: Path, draft_path: Path) -> None:
    """Give a draft the owner, group and mode of the file that it replaces, so that the service still reads it."""
    before, draft = path.stat(), draft_path.stat()
    if (before.st_uid, before.st_gid) != (draft.st_uid, draft.st_gid):
        try:
            os.chown(draft_path, before.st_uid, before.st_gid)
        except PermissionError:
            raise ConfigError(
                f"tokens file {path} belongs to uid {before.st_uid} and gid {before.st_gid}: run this command as that "
                "user or as root, else the service could not read the changed file",
                field="tokens_file",
            ) from None
    draft_path.chmod(stat.S_IMODE(before.st_mode))


def _entry_to_json(entry: TokenEntry) -> dict[str, object]:
    value_by_field = {name: getattr(entry, name) for name in TokenEntry.__annotations__}
    return {name: value for name, value in value_by_field.items() if value not in (None, "")}


@contextlib.contextmanager
def lock_tokens(path: Path) -> Iterator[None]:
    """Hold the lock that serialises changes of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def parse_moment(text: str, field: str) -> float:
    """Return the Unix seconds of a time in the file, infinite for ""; raise ConfigError if it is malformed."""
    if not text:
        return float("inf")
    try:
        parsed_time = datetime.fromisoformat(text)
    except ValueError:
        parsed_time = None
    if parsed_time is None or parsed_time.tzinfo is None:
        raise ConfigError(
            f"{field} must be a time like 2027-01-31T00:00:00+00:00, with its offset from UTC, not {text!r}",
            field=field,
        )
    return parsed_time.timestamp()
