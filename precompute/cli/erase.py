"""The command `erase`: what it was asked to do, done with or without a Redis, and how every erasure stands."""

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
from precompute.builds.copies import sweep_copies
from precompute.cli.console import Found, err
from precompute.cli.status_report import iso
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.erasing.erasing import (
    Standing,
    begin_erasing,
    drop_hot,
    drop_overlays,
    forget,
    look_without_redis,
    settle,
)
from precompute.erasing.holders import holders
from precompute.erasures.erasure import Erasure
from precompute.erasures.host_records import EntityHolder, declare_gone
from precompute.releases.registry import open_releases


def erase(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> Found:
    """Erases, re-admits, or only shows; blocking never waits for Redis."""
    store, kind = config.store(), arguments.kind
    if arguments.entity is None and not (arguments.list or arguments.gone):
        raise InvalidInput("name an entity, or pass --list to see all erasures", field="entity")
    noted = functools.partial(audited, store, actor=config.actor, reason=arguments.reason or "")
    if arguments.gone:
        with noted("declare_gone", f"host {arguments.gone}"):
            gone = declare_gone(store, arguments.gone)
        for copy in gone:
            err.print(f"forgotten: copies of {copy.generation} on {copy.host}", markup=False)
    raw = None if arguments.entity is None else canonical_id(arguments.entity)
    subject = "" if raw is None else f"{kind} {entity_digest(raw)}"
    erasure, is_new = None, False
    if raw is not None and arguments.forget:
        with noted("forget", subject):
            forget(store, raw, kind, at=time.time(), reason=arguments.reason or "")
    elif raw is not None and not (arguments.status or arguments.list):
        with noted("erase", subject) as told:
            erasure, is_new = begin_erasing(store, raw, kind, at=time.time())
            told["number"] = erasure.number
    dropped, standings = 0, None
    if config.redis_url:
        try:
            with open_releases(config) as releases:
                if raw is not None:
                    releases.control.announce("blocklist")
                if erasure is not None:
                    # Also of one that is done: a request under way when it was blocked may have left a record since.
                    dropped = drop_overlays(config, store, releases.control, [erasure])
                    drop_hot(config, store, releases.control, [erasure])
                sweep_copies(store)
                standings = settle(config, releases)
        except LarderError as error:
            err.print(f"Redis could not be asked: {error.message}", markup=False)
    if standings is None:
        standings = look_without_redis(store)
        err.print(
            "without Redis nothing is reported as done; replicas see the blocklist at their next poll, and overlays "
            f"expire by themselves within {config.overlay_ttl_s / 3600:.1f} h"
        )
    shown = [
        each
        for each in standings
        if raw is None or (each.erasure.raw == raw and each.erasure.kind == kind)
    ]
    counted = dropped if erasure is not None and config.redis_url else None
    done = {each.erasure.number for each in shown if not each.erasure.is_pending}
    is_unheld = erasure is not None and is_new and erasure.number in done
    notes = _unheld(config, erasure) if erasure is not None and is_unheld else []
    if arguments.json:
        rows = [_row(each) for each in shown]
        return {"erasures": rows, "overlays_dropped": counted, "notes": notes}
    return [*_shown(shown, counted), *notes]


def _row(each: Standing) -> dict[str, Any]:
    """An erasure for programs."""
    erasure = each.erasure
    return {
        "entity": erasure.entity,
        "as": erasure.kind,
        "asked_at": iso(erasure.at),
        "stands": each.word,
        "done_at": erasure.done_at and iso(erasure.done_at),
        "reason": erasure.reason,
        "held_by": [{"holder": _holder(held), "until": when} for held, when in each.held],
    }


def _unheld(config: NightConfig, erasure: Erasure) -> list[str]:
    """Lines on a request that was done at once: the id may be mistyped, or that of something else."""
    store = config.store()
    other: EntityKind = "item" if erasure.kind == "user" else "user"
    said = (
        f"no generation holds {erasure.kind} {erasure.entity!r}: check the id; it stays blocked and left out of later "
        f"nights (erase {shlex.quote(erasure.entity)} --as {erasure.kind} --forget --reason ... takes that back)"
    )
    lines = [said]
    if held := holders(store, [replace(erasure, kind=other)], {})[erasure.number]:
        names = ", ".join(sorted(each.generation for each in held if not each.is_copy))
        if names:
            lines.append(f"as {other} it is held by {names}: did you mean --as {other}?")
    return lines


def _shown(standings: Sequence[Standing], dropped: int | None) -> list[Table | str]:
    table = Table("entity", "as", "asked", "stands", "held by", "until")
    for each in standings:
        erasure = each.erasure
        done = erasure.done_at and f"done {iso(erasure.done_at)}"
        word = f"forgotten: {erasure.reason}" if each.word == "forgotten" else done or each.word
        rows = [(_holder(held), when) for held, when in each.held] or [("", "")]
        table.add_row(_plain(erasure.entity), erasure.kind, iso(erasure.at), word, *rows[0])
        for row in rows[1:]:
            table.add_row("", "", "", "", *row)
    pending = sum(each.word == "pending" for each in standings)
    lines = [f"{pending} pending, {len(standings) - pending} done or forgotten"]
    if any(held.is_copy for each in standings for held, _ in each.held):
        lines.append(
            "copies go with the next step, `retire` or service that runs on their host once they are an hour old; a "
            "host that never runs again keeps an erasure pending until `erase --gone HOST` (or a pattern) says so"
        )
    if dropped is not None:
        lines.append(f"{dropped} overlays dropped")
    return [table, *lines] if standings else ["no such erasure"]


def _holder(held: EntityHolder) -> str:
    return f"{held.generation} on {held.host}" if held.is_copy else held.generation


def _plain(entity: str) -> str:
    """An id as it is, or quoted where that could not be told from another one."""
    is_plain = entity.isprintable() and not any(each.isspace() for each in entity)
    return entity if is_plain else repr(entity)
