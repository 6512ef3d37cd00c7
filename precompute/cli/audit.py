"""The command `audit`: who published, rolled back, overrode, blocked, erased or changed tokens, and how it ended."""

import argparse
from dataclasses import asdict
from datetime import UTC, datetime

from rich.table import Table

from cache.errors import ConfigError
from cache.format.ids import canonical_id
from cache.process.command_line import json_text
from cache.store.audit import AuditRecord, audit_records, entity_digest
from precompute.cli.console import CommandOutput, OutputContent
from precompute.cli.status_report import iso
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig


def audit(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> OutputContent | CommandOutput:
    """All records, or those since a time or about one entity."""
    earliest_at = 0.0 if arguments.since is None else _moment(arguments.since)
    about = "" if arguments.entity is None else entity_digest(canonical_id(arguments.entity))
    records = [
        record
        for record in audit_records(config.store())
        # One that cannot be read has no time, and is never left out.
        if (record.at >= earliest_at or record.outcome in ("missing", "unreadable"))
        and about in record.subject
    ]
    if arguments.json:
        return CommandOutput(json_text(list(map(asdict, records))))
    return [_table(records)] if records else ["nothing was written down"]


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--since is a time in ISO 8601, not {text!r}", field="since") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _table(records: list[AuditRecord]) -> Table:
    table = Table("number", "time", "who", "what", "of", "why", "ended")
    for record in records:
        outcome_text = f"{record.outcome}: {record.error}" if record.error else record.outcome
        at = iso(record.at) if record.at else ""
        table.add_row(
            str(record.number),
            at,
            record.actor,
            record.action,
            record.subject,
            record.reason,
            outcome_text,
        )
    return table
