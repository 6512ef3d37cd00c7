"""`python -m serving tokens`: create, list and revoke the named tokens of a file; the audit log records changes."""

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cache.errors import TOKEN_PREFIX, ConfigError, LarderError
from cache.process.command_line import json_text, printable_lines
from cache.store.audit import audited
from serving.access.token_file import (
    MEANING_BY_SCOPE,
    TokenEntries,
    TokenEntry,
    check_token_name,
    lock_tokens,
    read_tokens,
    write_tokens,
)

if TYPE_CHECKING:
    from cache.config.serving import ServingConfig

_TOKEN_DAYS_MAX = 36_500.0

_REDIS_TIMEOUT_S = 3.0

PROG = "python -m serving tokens"


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Run the command; return 0 on success, 2 on failure (the reason goes to standard error)."""
    from cache.config.serving import ServingConfig  # they load pydantic, which --help does not need

    options = argument_parser(prog).parse_args(arguments)
    try:
        config = ServingConfig.load(os.environ)
        tokens_path = Path(options.file).absolute() if options.file else Path(config.tokens_file)
        if not (options.file or config.tokens_file):
            raise ConfigError("name the file: tokens_file in [serving], LARDER_TOKENS_FILE or --file")
        if options.command == "list":
            print(printable_lines(_format_tokens(read_tokens(tokens_path), as_json=options.json)))
        elif options.command == "add":
            _demand_own_store(config)
            token = _add_token(config, tokens_path, options)
            print(json_text({"name": options.name, "token": token}) if options.json else token)
        else:
            _revoke_token(config, tokens_path, options)
            if options.json:
                print(json_text({"name": options.name, "revoked": True}))
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return 2
    return 0


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Named tokens of the service with their scopes, quotas and expiry. The file holds their hashes; a "
        "running service reads it again within a second. `larder audit` shows changes.",
    )
    parser.add_argument("--file", help="default: tokens_file of the settings")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_parser = commands.add_parser("add", help="create a token and print it; it cannot be shown again")
    add_parser.add_argument("name", help="name of the token's owner in logs and metrics")
    add_parser.add_argument(
        "--scope",
        action="append",
        required=True,
        choices=list(MEANING_BY_SCOPE),
        help="what the token may be used for; repeat the option for several scopes",
    )
    add_parser.add_argument("--days", type=float, help="days until the token expires (default: never)")
    add_parser.add_argument("--requests-per-s", type=float, help="over all workers of a service")
    add_parser.add_argument("--entities-per-s", type=float, help="over all workers of a service")
    add_parser.add_argument("--in-flight", type=int, help="requests in flight at once")
    add_parser.add_argument("--reason", default="", help="kept in the audit log")
    list_parser = commands.add_parser("list", help="list token names with their scopes and quotas")
    revoke_parser = commands.add_parser("revoke", help="refuse a token from now on")
    revoke_parser.add_argument("name")
    revoke_parser.add_argument("--reason", default="", help="kept in the audit log")
    for command_parser in (add_parser, list_parser, revoke_parser):
        command_parser.add_argument("--json", action="store_true", help="for programs")
        # Also accepted behind the command; without a default, so that it does not hide the one before it.
        command_parser.add_argument("--file", default=argparse.SUPPRESS, help="default: tokens_file of the settings")
    return parser


def _demand_own_store(config: "ServingConfig") -> None:
    """Raise Conflict if this store, which has the audit log, belongs to another Redis.

    Not called for `revoke`: nothing may delay or prevent a revocation.
    """
    from cache.control.store_problems import demand_own_store

    demand_own_store(config, config.redis_url, _REDIS_TIMEOUT_S)


def _add_token(config: "ServingConfig", tokens_path: Path, options: argparse.Namespace) -> str:
    """Return a new token; add its hash to the file."""
    token_name = options.name
    check_token_name(token_name, "tokens add")
    expiry_days: float | None = options.days
    if expiry_days is not None and not 0 < expiry_days <= _TOKEN_DAYS_MAX:
        raise ConfigError(f"--days must be above 0 and at most {_TOKEN_DAYS_MAX:g}, not {expiry_days:g}")
    token = f"{TOKEN_PREFIX}{secrets.token_urlsafe(32)}"
    created_at = datetime.now(UTC).replace(microsecond=0)
    token_entry = TokenEntry(
        sha256=hashlib.sha256(token.encode()).hexdigest(),
        scopes=tuple(dict.fromkeys(options.scope)),
        expires_at="" if expiry_days is None else (created_at + timedelta(days=expiry_days)).isoformat(),
        requests_per_s=options.requests_per_s,
        entities_per_s=options.entities_per_s,
        in_flight=options.in_flight,
        created_at=created_at.isoformat(),
    )
    with (
        audited(config.store(), "token_add", token_name, actor=config.actor, reason=options.reason),
        lock_tokens(tokens_path),
    ):
        tokens = dict(read_tokens(tokens_path)) if tokens_path.exists() else {}
        if token_name in tokens:
            raise ConfigError(
                f"there is a token {token_name!r} in {tokens_path}: revoke it first, or choose another name"
            )
        write_tokens(tokens_path, tokens | {token_name: token_entry})
    return token


def _revoke_token(config: "ServingConfig", tokens_path: Path, options: argparse.Namespace) -> None:
    token_name = options.name
    check_token_name(token_name, "tokens revoke")  # a token pasted in place of its name must not reach the audit log
    with (
        audited(config.store(), "token_revoke", token_name, actor=config.actor, reason=options.reason),
        lock_tokens(tokens_path),
    ):
        tokens = dict(read_tokens(tokens_path))
        if tokens.pop(token_name, None) is None:
            raise ConfigError(f"there is no token {token_name!r} in {tokens_path}")
        write_tokens(tokens_path, tokens)


def _format_tokens(tokens: TokenEntries, *, as_json: bool) -> str:
    if as_json:
        shown_fields = [field_name for field_name in TokenEntry.__annotations__ if field_name != "sha256"]
        fields_by_name = {
            token_name: {field_name: getattr(token_entry, field_name) for field_name in shown_fields}
            for token_name, token_entry in tokens.items()
        }
        return json_text(fields_by_name)
    table_rows = [("name", "scopes", "requests/s", "entities/s", "in flight", "expires")]
    table_rows += [_token_row(token_name, token_entry) for token_name, token_entry in sorted(tokens.items())]
    column_widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, column_widths, strict=True)).rstrip()
        for row in table_rows
    )


def _token_row(token_name: str, token_entry: TokenEntry) -> tuple[str, str, str, str, str, str]:
    quota_limits = (token_entry.requests_per_s, token_entry.entities_per_s, token_entry.in_flight)
    requests_text, entities_text, in_flight_text = (
        "-" if quota_limit is None else f"{quota_limit:g}" for quota_limit in quota_limits
    )
    expiry_text = token_entry.expires_at or "never"
    if token_entry.expires_at_s <= datetime.now(UTC).timestamp():
        expiry_text += " (expired)"
    return (token_name, ",".join(token_entry.scopes), requests_text, entities_text, in_flight_text, expiry_text)
