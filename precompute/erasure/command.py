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
from cache.store.erasures import Erasure
from precompute.builds.build import sweep_copies
from precompute.config.console import OutputContent, err_console, iso
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import (
    ErasureStatus,
    begin_erasing,
    drop_from_sketches,
    drop_overlays,
    readmit_entity,
    settle_erasures,
    statuses_without_redis,
)
from precompute.erasure.holders import EntityHolder, declare_hosts_gone, holders_by_erasure_number
from precompute.releases.release_log import open_releases


def erase(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> OutputContent:
    """Erase an entity, re-admit it, or only list erasures; blocking never waits for Redis."""
    store, entity_kind = config.store(), arguments.kind
    if arguments.entity is None and not (arguments.list or arguments.gone):
        raise InvalidInput("name an entity, or pass --list to see all erasures", field="entity")
    audit_action = functools.partial(audited, store, actor=config.actor, reason=arguments.reason or "")
    if arguments.gone:
        with audit_action("declare_gone", f"host {arguments.gone}"):
            forgotten_copies = declare_hosts_gone(store, arguments.gone)
        for copy in forgotten_copies:
            err_console.print(f"forgotten: copies of {copy.generation} on {copy.host}", markup=False)
    entity_id = None if arguments.entity is None else canonical_id(arguments.entity)
    subject = "" if entity_id is None else f"{entity_kind} {entity_digest(entity_id)}"
    erasure, is_new = None, False
    if entity_id is not None and arguments.forget:
        with audit_action("forget", subject):
            readmit_entity(store, entity_id, entity_kind, forgotten_at=time.time(), reason=arguments.reason or "")
    elif entity_id is not None and not (arguments.status or arguments.list):
        with audit_action("erase", subject) as audit_details:
            erasure, is_new = begin_erasing(store, entity_id, entity_kind, requested_at=time.time())
            audit_details["number"] = erasure.number
    dropped_overlay_count, erasure_statuses = 0, None
    if config.redis_url:
        try:
            with open_releases(config) as releases:
                if entity_id is not None:
                    releases.control.announce("blocklist")
                if erasure is not None:
                    # Also for an erasure that is done: a request in progress when the entity was blocked may have
                    # stored a record since.
                    dropped_overlay_count = drop_overlays(config, store, releases.control, [erasure])
                    drop_from_sketches(config, store, releases.control, [erasure])
                sweep_copies(store)
                erasure_statuses = settle_erasures(config, releases)
        except LarderError as error:
            err_console.print(f"Redis does not answer: {error.message}", markup=False)
    if erasure_statuses is None:
        erasure_statuses = statuses_without_redis(store)
        err_console.print(
            "without Redis no erasure is reported as done; replicas see the blocklist at their next poll, and "
            f"overlays expire within {config.overlay_ttl_s / 3600:.1f} h"
        )
    selected_statuses = [
        erasure_status
        for erasure_status in erasure_statuses
        if entity_id is None
        or (erasure_status.erasure.raw_id == entity_id and erasure_status.erasure.kind == entity_kind)
    ]
    reported_overlay_count = dropped_overlay_count if erasure is not None and config.redis_url else None
    finished_numbers = {
        erasure_status.erasure.number for erasure_status in selected_statuses if not erasure_status.erasure.is_pending
    }
    is_done_at_once = erasure is not None and is_new and erasure.number in finished_numbers
    remarks = _warn_of_unheld_entity(config, erasure) if erasure is not None and is_done_at_once else []
    if erasure is not None and not store.names("generations"):
        remarks.append(
            f"there is no generation in {store.url}, so the erasure stays pending until a night has finished there; if "
            "your nights use another store, correct artifacts (LARDER_ARTIFACTS)"
        )
    if arguments.json:
        json_rows = [_status_to_json(erasure_status) for erasure_status in selected_statuses]
        return {"erasures": json_rows, "overlays_dropped": reported_overlay_count, "notes": remarks}
    return [*_render_statuses(selected_statuses, reported_overlay_count), *remarks]


def _status_to_json(erasure_status: ErasureStatus) -> dict[str, Any]:
    """Return an erasure as JSON-able fields."""
    erasure = erasure_status.erasure
    return {
        "entity": erasure.entity,
        "as": erasure.kind,
        "asked_at": iso(erasure.at),
        "stands": erasure_status.state,
        "done_at": erasure.done_at and iso(erasure.done_at),
        "reason": erasure.reason,
        "held_by": [
            {"holder": _holder_text(holder), "until": removal_text}
            for holder, removal_text in erasure_status.holders_and_removals
        ],
    }


def _warn_of_unheld_entity(config: NightConfig, erasure: Erasure) -> list[str]:
    """Return warnings about a request that was done at once: the id may be mistyped, or of another kind."""
    store = config.store()
    opposite_kind: EntityKind = "item" if erasure.kind == "user" else "user"
    warning = (
        f"no generation holds {erasure.kind} {erasure.entity!r}: check the id; it stays blocked and left out of later "
        f"nights (erase {shlex.quote(erasure.entity)} --as {erasure.kind} --forget --reason ... reverts that)"
    )
    warning_lines = [warning]
    if opposite_holders := holders_by_erasure_number(store, [replace(erasure, kind=opposite_kind)], {})[erasure.number]:
        generations_text = ", ".join(sorted(holder.generation for holder in opposite_holders if not holder.is_copy))
        if generations_text:
            warning_lines.append(
                f"generations hold it as {opposite_kind}: {generations_text}: did you mean --as {opposite_kind}?"
            )
    return warning_lines


def _render_statuses(erasure_statuses: Sequence[ErasureStatus], dropped_overlay_count: int | None) -> list[Table | str]:
    table = Table("entity", "as", "asked", "stands", "held by", "until")
    for erasure_status in erasure_statuses:
        erasure = erasure_status.erasure
        done_text = erasure.done_at and f"done {iso(erasure.done_at)}"
        state_text = (
            f"forgotten: {erasure.reason}" if erasure_status.state == "forgotten" else done_text or erasure_status.state
        )
        holder_rows = [
            (_holder_text(holder), removal_text) for holder, removal_text in erasure_status.holders_and_removals
        ] or [("", "")]
        table.add_row(_quote_if_ambiguous(erasure.entity), erasure.kind, iso(erasure.at), state_text, *holder_rows[0])
        for holder_row in holder_rows[1:]:
            table.add_row("", "", "", "", *holder_row)
    pending_count = sum(erasure_status.state == "pending" for erasure_status in erasure_statuses)
    summary_lines = [f"{pending_count} pending, {len(erasure_statuses) - pending_count} done or forgotten"]
    if any(holder.is_copy for erasure_status in erasure_statuses for holder, _ in erasure_status.holders_and_removals):
        summary_lines.append(
            "copies are removed by the next step, `retire` or service on their host once they are an hour old; for a "
            "host that will never run again, `erase --gone HOST` (or a pattern) ends the wait"
        )
    if dropped_overlay_count is not None:
        summary_lines.append(f"{dropped_overlay_count} overlays dropped")
    return [table, *summary_lines] if erasure_statuses else ["no such erasure"]


def _holder_text(holder: EntityHolder) -> str:
    return f"{holder.generation} on {holder.host}" if holder.is_copy else holder.generation


def _quote_if_ambiguous(entity_id: str) -> str:
    """Return an id unchanged, or quoted if it could be mistaken for another one."""
    is_plain = entity_id.isprintable() and not any(character.isspace() for character in entity_id)
    return entity_id if is_plain else repr(entity_id)
