"""The command `audit`: who published, rolled back, overrode, blocked, erased or changed tokens, and how it ended."""

import argparse
from dataclasses import asdict
from datetime import UTC, datetime

from rich.table import Table

from cache.errors import ConfigError
from cache.format.ids import canonical_id
from cache.process.command_line import json_text
from cache.store.audit import AuditRecord, audit_records, entity_digest
from precompute.cli.console import Found, Told
from precompute.cli.status_report import iso
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig


def audit(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> Found | Told:
    """All records, or those since a time or about one entity."""
    since = 0.0 if arguments.since is None else _moment(arguments.since)
    about = "" if arguments.entity is None else entity_digest(canonical_id(arguments.entity))
    records = [
        each
        for each in audit_records(config.store())
        # One that cannot be read has no time, and is never left out.
        if (each.at >= since or each.outcome in ("missing", "unreadable")) and about in each.subject
    ]
    if arguments.json:
        return Told(json_text(list(map(asdict, records))))
    return [_table(records)] if records else ["nothing was written down"]


def _moment(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--since is a time in ISO 8601, not {text!r}", field="since") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _table(records: list[AuditRecord]) -> Table:
    table = Table("number", "time", "who", "what", "of", "why", "ended")
    for each in records:
        ended = f"{each.outcome}: {each.error}" if each.error else each.outcome
        at = iso(each.at) if each.at else ""
        table.add_row(
            str(each.number), at, each.actor, each.action, each.subject, each.reason, ended
        )
    return table
