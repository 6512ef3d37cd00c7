"""Tokens file: names, hashes, scopes, quotas and expiry of tokens, without the tokens themselves.

A token has 256 random bits, so its plain SHA-256 can be neither reversed nor guessed. Only passwords that people choose
need a slow hash.
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

MEANING_BY_SCOPE: Mapping[Scope, str] = {
    "read": "lookups, and which generations are served",
    "score": "ranking of candidates",
    "feedback": "feedback on answers",
    "events": "sending events of users and items",
    "explain": "explanations of an entity's answer",
    "admin": "the dashboard's data",
}
"""Meaning by scope; `/healthz`, `/readyz`, `/metrics`, the dashboard's page and the documentation need no scope."""

DEFAULT_CALLER_NAME = "default"
"""Name of the token in `LARDER_TOKEN`; no token of the file may have it."""

TOKENS_MAX = 256
TOKEN_FILE_BYTES_MAX = 1 << 20
TOKEN_FILE_VERSION = 1
_TOKEN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


@section
class TokenEntry:
    """Entry of one token; its key in the file is the token's name."""

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
        if not _HEX_DIGEST_PATTERN.fullmatch(self.sha256):
            raise ConfigError(  # the value is not quoted: it may be a token
                "sha256 must be 64 hex digits in lower case, as `larder tokens add` writes them", field="sha256"
            )
        for scope in self.scopes:
            if scope not in MEANING_BY_SCOPE:
                raise ConfigError(f"scopes must be among {', '.join(MEANING_BY_SCOPE)}, not {scope!r}", field="scopes")
        if not self.scopes:
            raise ConfigError(f"scopes must name at least one of {', '.join(MEANING_BY_SCOPE)}", field="scopes")
        for time_field_name in ("expires_at", "created_at"):
            parse_file_time(getattr(self, time_field_name), time_field_name)

    @property
    def expires_at_s(self) -> float:
        """Unix seconds of expiry; infinite: never."""
        return parse_file_time(self.expires_at, "expires_at")

    @property
    def limits(self) -> QuotaLimits:
        """Quotas of the token."""
        return QuotaLimits(self.requests_per_s, self.entities_per_s, self.in_flight)


TokenEntries = Mapping[str, TokenEntry]


def read_tokens(tokens_path: Path) -> TokenEntries:
    """Read the file's entries by name; raise ConfigError, naming file, token, field, value and allowed values."""
    try:
        with tokens_path.open("rb") as file:
            file_bytes = file.read(TOKEN_FILE_BYTES_MAX + 1)
    except OSError as error:
        remedy = "`larder tokens add NAME` creates it"
        if isinstance(error, PermissionError):
            remedy = "make it readable for the service's user, by its owner or by its group and mode 0640"
        raise ConfigError(
            f"cannot read tokens file {tokens_path}: {error.strerror}; {remedy}", field="tokens_file"
        ) from error
    if len(file_bytes) > TOKEN_FILE_BYTES_MAX:
        raise ConfigError(f"tokens file {tokens_path} is larger than {TOKEN_FILE_BYTES_MAX:,} bytes")
    try:
        document = orjson.loads(file_bytes)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"tokens file {tokens_path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.keys() != {"version", "tokens"}:
        raise ConfigError(f"tokens file {tokens_path} must be an object with exactly `version` and `tokens`")
    if document["version"] != TOKEN_FILE_VERSION:
        raise ConfigError(
            f"tokens file {tokens_path}: version must be {TOKEN_FILE_VERSION}, not {document['version']!r:.40}"
        )
    raw_entries = document["tokens"]
    if not isinstance(raw_entries, dict) or len(raw_entries) > TOKENS_MAX:
        raise ConfigError(f"tokens file {tokens_path}: tokens must be an object of at most {TOKENS_MAX} names")
    entry_by_name = {
        token_name: _parse_token_entry(tokens_path, token_name, raw_entry)
        for token_name, raw_entry in raw_entries.items()
    }
    name_by_digest: dict[str, str] = {}
    for token_name, token_entry in entry_by_name.items():
        if (earlier_name := name_by_digest.setdefault(token_entry.sha256, token_name)) != token_name:
            raise ConfigError(f"tokens file {tokens_path}: {earlier_name} and {token_name} have the same sha256")
    return entry_by_name


def _parse_token_entry(tokens_path: Path, token_name: str, raw_entry: Any) -> TokenEntry:
    entry_place = f"tokens file {tokens_path}: token {token_name[:64]!r}"
    check_token_name(token_name, entry_place)
    if not isinstance(raw_entry, dict):
        raise ConfigError(f"{entry_place} must be an object of settings")
    entry_fields: dict[str, Any] = {
        field_name: tuple(field_value) if isinstance(field_value, list) else field_value
        for field_name, field_value in raw_entry.items()
    }
    try:
        return TokenEntry(**entry_fields)
    except ConfigError as error:
        raise ConfigError(f"{entry_place}: {error.message}", **error.details) from None


def check_token_name(token_name: str, error_place: str) -> None:
    """Raise ConfigError unless this is a valid name for a token in the file."""
    if token_name == DEFAULT_CALLER_NAME:
        raise ConfigError(f"{error_place}: {DEFAULT_CALLER_NAME!r} is the name of LARDER_TOKEN", field="name")
    if not _TOKEN_NAME_PATTERN.fullmatch(token_name):
        raise ConfigError(
            f"{error_place}: a name has 1 to 64 letters, digits, dots, hyphens or underscores, and begins with a "
            "letter or digit",
            field="name",
        )


def write_tokens(tokens_path: Path, entry_by_name: TokenEntries) -> None:
    """Replace the file atomically, keeping owner, group and mode; a new file is readable by its owner only.

    Raises ConfigError for too many tokens, and if this user cannot restore the file's owner and group.
    """
    if len(entry_by_name) > TOKENS_MAX:
        raise ConfigError(f"tokens file {tokens_path} holds at most {TOKENS_MAX} tokens: revoke some")
    fields_by_name = {token_name: _entry_to_json(entry) for token_name, entry in sorted(entry_by_name.items())}
    file_bytes = orjson.dumps(
        {"version": TOKEN_FILE_VERSION, "tokens": fields_by_name},
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    with open_draft(tokens_path) as draft_path:
        draft_path.touch(mode=0o600)
        draft_path.write_bytes(file_bytes)
        if tokens_path.exists():
            _copy_owner(tokens_path, draft_path)


def _copy_owner(tokens_path: Path, draft_path: Path) -> None:
    """Give the new file the owner, group and mode of the replaced file, so that the service can still read it."""
    replaced_stat, draft_stat = tokens_path.stat(), draft_path.stat()
    if (replaced_stat.st_uid, replaced_stat.st_gid) != (draft_stat.st_uid, draft_stat.st_gid):
        try:
            os.chown(draft_path, replaced_stat.st_uid, replaced_stat.st_gid)
        except PermissionError:
            raise ConfigError(
                f"tokens file {tokens_path} belongs to uid {replaced_stat.st_uid} and gid {replaced_stat.st_gid}: run "
                "this command as that user or as root, else the service could not read the changed file",
                field="tokens_file",
            ) from None
    draft_path.chmod(stat.S_IMODE(replaced_stat.st_mode))


def _entry_to_json(entry: TokenEntry) -> dict[str, object]:
    value_by_field = {field_name: getattr(entry, field_name) for field_name in TokenEntry.__annotations__}
    return {
        field_name: field_value for field_name, field_value in value_by_field.items() if field_value not in (None, "")
    }


@contextlib.contextmanager
def lock_tokens(tokens_path: Path) -> Iterator[None]:
    """Hold the lock that serialises changes of the file."""
    tokens_path.parent.mkdir(parents=True, exist_ok=True)
    folder_descriptor = os.open(tokens_path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder_descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder_descriptor)


def parse_file_time(time_text: str, field_name: str) -> float:
    """Return the Unix seconds of a time in the file, infinite for ""; raise ConfigError if it is malformed."""
    if not time_text:
        return float("inf")
    try:
        parsed_time = datetime.fromisoformat(time_text)
    except ValueError:
        parsed_time = None
    if parsed_time is None or parsed_time.tzinfo is None:
        raise ConfigError(
            f"{field_name} must be a time like 2027-01-31T00:00:00+00:00, with its offset from UTC, not {time_text!r}",
            field=field_name,
        )
    return parsed_time.timestamp()
