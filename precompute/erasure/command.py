"""Command `erase`: erases, re-admits or lists entities, with or without Redis, and reports on every erasure."""

import argparse
import functools
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from cache.errors import InvalidInput, LarderError
from cache.format.ids import canonical_id
from cache.format.manifest import EntityKind
from cache.store.audit import audited, entity_digest
from precompute.builds.build import sweep_copies
from precompute.config.console import OutputContent, err_console, iso
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import (
    ErasureStatus,
    begin_erasing,
    drop_hot,
    drop_overlays,
    forget,
    look_without_redis,
    settle,
)
from precompute.erasure.holders import EntityHolder, declare_hosts_gone, holders
from precompute.releases.release_log import open_releases
from precompute.sources.erasures import Erasure


def erase(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> OutputContent:
    """Erase, re-admit, or only list; blocking never waits for Redis."""
    store, kind = config.store(), arguments.kind
    if arguments.entity is None and not (arguments.list or arguments.gone):
        raise InvalidInput("name an entity, or pass --list to see all erasures", field="entity")
    audit_action = functools.partial(
        audited, store, actor=config.actor, reason=arguments.reason or ""
    )
    if arguments.gone:
        with audit_action("declare_gone", f"host {arguments.gone}"):
            forgotten_copies = declare_hosts_gone(store, arguments.gone)
        for copy in forgotten_copies:
            err_console.print(
                f"forgotten: copies of {copy.generation} on {copy.host}", markup=False
            )
    raw = None if arguments.entity is None else canonical_id(arguments.entity)
    subject = "" if raw is None else f"{kind} {entity_digest(raw)}"
    erasure, is_new = None, False
    if raw is not None and arguments.forget:
        with audit_action("forget", subject):
            forget(store, raw, kind, at=time.time(), reason=arguments.reason or "")
    elif raw is not None and not (arguments.status or arguments.list):
        with audit_action("erase", subject) as audit_details:
            erasure, is_new = begin_erasing(store, raw, kind, at=time.time())
            audit_details["number"] = erasure.number
    dropped_overlay_count, standings = 0, None
    if config.redis_url:
        try:
            with open_releases(config) as releases:
                if raw is not None:
                    releases.control.announce("blocklist")
                if erasure is not None:
                    # Also of one that is done: a request under way when it was blocked may have left a record since.
                    dropped_overlay_count = drop_overlays(
                        config, store, releases.control, [erasure]
                    )
                    drop_hot(config, store, releases.control, [erasure])
                sweep_copies(store)
                standings = settle(config, releases)
        except LarderError as error:
            err_console.print(f"Redis could not be asked: {error.message}", markup=False)
    if standings is None:
        standings = look_without_redis(store)
        err_console.print(
            "without Redis nothing is reported as done; replicas see the blocklist at their next poll, and overlays "
            f"expire by themselves within {config.overlay_ttl_s / 3600:.1f} h"
        )
    selected_standings = [
        standing
        for standing in standings
        if raw is None or (standing.erasure.raw == raw and standing.erasure.kind == kind)
    ]
    reported_overlay_count = (
        dropped_overlay_count if erasure is not None and config.redis_url else None
    )
    finished_numbers = {
        standing.erasure.number
        for standing in selected_standings
        if not standing.erasure.is_pending
    }
    is_unheld = erasure is not None and is_new and erasure.number in finished_numbers
    notes = _unheld(config, erasure) if erasure is not None and is_unheld else []
    if erasure is not None and not store.names("generations"):
        notes.append(
            f"there is no generation in {store.url}, so the erasure stays pending until a night is done there; if "
            "that is not the store of your nights, correct artifacts (LARDER_ARTIFACTS)"
        )
    if arguments.json:
        rows = [_row(standing) for standing in selected_standings]
        return {"erasures": rows, "overlays_dropped": reported_overlay_count, "notes": notes}
    return [*_render_statuses(selected_standings, reported_overlay_count), *notes]


def _row(standing: ErasureStatus) -> dict[str, Any]:
    """Return an erasure as JSON-able fields."""
    erasure = standing.erasure
    return {
        "entity": erasure.entity,
        "as": erasure.kind,
        "asked_at": iso(erasure.at),
        "stands": standing.state,
        "done_at": erasure.done_at and iso(erasure.done_at),
        "reason": erasure.reason,
        "held_by": [
            {"holder": _holder(holder), "until": when} for holder, when in standing.holders
        ],
    }


def _unheld(config: NightConfig, erasure: Erasure) -> list[str]:
    """Return warning lines on a request that was done at once: the id may be mistyped, or of another kind."""
    store = config.store()
    opposite_kind: EntityKind = "item" if erasure.kind == "user" else "user"
    warning = (
        f"no generation holds {erasure.kind} {erasure.entity!r}: check the id; it stays blocked and left out of later "
        f"nights (erase {shlex.quote(erasure.entity)} --as {erasure.kind} --forget --reason ... takes that back)"
    )
    lines = [warning]
    if opposite_holders := holders(store, [replace(erasure, kind=opposite_kind)], {})[
        erasure.number
    ]:
        names = ", ".join(
            sorted(holder.generation for holder in opposite_holders if not holder.is_copy)
        )
        if names:
            lines.append(
                f"as {opposite_kind} it is held by {names}: did you mean --as {opposite_kind}?"
            )
    return lines


def _render_statuses(
    standings: Sequence[ErasureStatus], dropped_overlay_count: int | None
) -> list[Table | str]:
    table = Table("entity", "as", "asked", "stands", "held by", "until")
    for standing in standings:
        erasure = standing.erasure
        done_text = erasure.done_at and f"done {iso(erasure.done_at)}"
        state_text = (
            f"forgotten: {erasure.reason}"
            if standing.state == "forgotten"
            else done_text or standing.state
        )
        rows = [(_holder(holder), when) for holder, when in standing.holders] or [("", "")]
        table.add_row(
            _quote_if_ambiguous(erasure.entity), erasure.kind, iso(erasure.at), state_text, *rows[0]
        )
        for row in rows[1:]:
            table.add_row("", "", "", "", *row)
    pending = sum(standing.state == "pending" for standing in standings)
    lines = [f"{pending} pending, {len(standings) - pending} done or forgotten"]
    if any(holder.is_copy for standing in standings for holder, _ in standing.holders):
        lines.append(
            "copies go with the next step, `retire` or service that runs on their host once they are an hour old; a "
            "host that never runs again keeps an erasure pending until `erase --gone HOST` (or a pattern) says so"
        )
    if dropped_overlay_count is not None:
        lines.append(f"{dropped_overlay_count} overlays dropped")
    return [table, *lines] if standings else ["no such erasure"]


def _holder(holder: EntityHolder) -> str:
    return f"{holder.generation} on {holder.host}" if holder.is_copy else holder.generation


def _quote_if_ambiguous(entity: str) -> str:
    """Return an id unchanged, or quoted if it could be mistaken for another one."""
    is_plain = entity.isprintable() and not any(character.isspace() for character in entity)
    return entity if is_plain else repr(entity)
