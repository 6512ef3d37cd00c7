"""Commands of the shell, a function for each: what it does, and what it found to show.

Each imports what it alone needs: libraries that the others do without.
"""

import argparse
import math
import os
from typing import Any

from rich.markup import escape
from rich.table import Table

from cache.errors import ConfigError, Conflict, LarderError
from cache.format.ids import canonical_id
from cache.process.command_line import NOT_WELL, json_text
from cache.store.audit import Audited, audited, ids_in_words
from cache.store.blocklist import change_blocklist
from precompute.builds.night import Night, size_text
from precompute.cli.console import CommandOutput, OutputContent, err_console, table_of
from precompute.cli.step_commands import standing_name
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.control_keys import Control, connect
from precompute.operations.night import run_night
from precompute.releases.attempts import new_attempt
from precompute.releases.registry import open_releases


def night(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """The whole night; one row per step."""
    data_until, attempt = arguments.data_until, arguments.attempt or new_attempt()
    named = standing_name(config, data_until)
    night = Night(config, attempt, data_until, named=named, progress=progress)
    steps = run_night(night, arguments.until)
    if arguments.json:
        return {
            "generation": steps[0][1].result["generation"],
            "seconds": round(sum(seconds for _, _, seconds in steps), 3),
            "steps": [
                {
                    "step": step,
                    "what": row.summary.replace("\n", "; "),
                    "seconds": round(seconds, 3),
                    "size_bytes": row.size_bytes,
                }
                for step, row, seconds in steps
            ],
        }
    table = Table("step", "what", "seconds", "rate", "size")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for step, row, seconds in steps:
        size = size_text(row.size_bytes) if row.size_bytes else ""
        step_summary = escape(row.summary)
        table.add_row(
            step.replace("_", " "), step_summary, f"{seconds:.2f}", row.rate(seconds), size
        )
    table.add_section()
    table.add_row(
        "night", steps[0][1].result["generation"], f"{sum(seconds for _, _, seconds in steps):.2f}"
    )
    generation = steps[0][1].result["generation"]
    if steps[-1][0] == "verify":
        publish_hint = (
            f"{generation} is verified, and not published: `larder canary start {generation}` tries it on a share of "
            f"the requests, `larder publish {generation}` publishes it."
        )
        return [table, publish_hint]
    return [table]


def train(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """The reference bundle, trained on the configured sources."""
    from precompute.operations.train import train_reference

    training_report = train_reference(config, data_until=arguments.data_until, progress=progress)
    if arguments.json:
        return training_report
    lines: list[Any] = [table_of(training_report)]
    if training_report["recall_at_20"] is not None:
        holdout_selection = (
            "the latest" if training_report["held_out"] == "latest" else "chosen at random"
        )
        lines.append(
            f"{training_report['recall_at_20']:.0%} of the interactions that were held out ({holdout_selection}) stood "
            "among 20 suggestions: "
            f"the best of {training_report['shapes_tried']} models tried."
        )
    return lines


def hand_over_bundle(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """A bundle put into the store, which all nights use from now on."""
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import hand_over

    bundle = Bundle.open(config.path(arguments.folder))
    progress("hand over", 0, 1)
    hand_over(config.store(), bundle)
    progress("hand over", 1, 1)
    return {"bundle": bundle.name, "version": bundle.version, "digest": bundle.digest}


def roll_back(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    """An earlier generation made live again."""
    from precompute.operations.roll_back import roll_back as move_back

    attempt = arguments.attempt or new_attempt()
    return move_back(config, to=arguments.to, reason=arguments.reason, attempt=attempt)


def restore(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """A lost Redis rebuilt from the store, or a strange one made to follow it."""
    from precompute.operations.adopt import adopt
    from precompute.operations.restore import restore as restore_redis

    if arguments.adopt:
        return adopt(config, reason=arguments.reason, attempt=new_attempt(), progress=progress)
    return restore_redis(config, attempt=new_attempt(), progress=progress)


def pin(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Pins, or lifts a pin."""
    with open_releases(config) as releases:
        if arguments.unpin:
            if arguments.generation not in releases.ledger().pinned:
                raise Conflict(f"{arguments.generation} is not pinned: `status` shows what is")
            releases.unpin(arguments.generation, attempt=new_attempt())
        else:
            days, reason = arguments.days, demand_reason("a pin", arguments.reason)
            if days is not None and not 0 < days < math.inf:
                raise ConfigError(f"--days is a number above 0, not {days:g}", field="days")
            expires_at = None if days is None else releases.clock() + days * 86_400
            releases.pin(
                arguments.generation,
                reason=reason,
                expires_at=expires_at,
                attempt=new_attempt(),
            )
    return {"generation": arguments.generation, "pinned": not arguments.unpin}


def block(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    """Blocks, or unblocks; replicas are told if any can be."""
    from precompute.erasures.erasure import demand_unerased

    items = [canonical_id(item_id) for item_id in arguments.item]
    entities = [canonical_id(entity_id) for entity_id in arguments.entity]
    store = config.store()
    action: Audited = "unblock" if arguments.unblock else "block"
    subject, reason = ids_in_words(items, entities), arguments.reason
    with audited(store, action, subject, actor=config.actor, reason=reason) as audit_details:
        if arguments.unblock:
            demand_unerased(store, items)
            blocklist = change_blocklist(store, unblock_items=items, unblock_entities=entities)
        else:
            blocklist = change_blocklist(store, block_items=items, block_entities=entities)
        audit_details["version"] = blocklist.version
    if config.redis_url:
        try:
            with connect(config.redis_url, config.redis_timeout_s) as client:
                Control(client, config.keyspace()).announce("blocklist")
        except LarderError as error:
            err_console.print(
                f"replicas will see the change at their next poll, since {error.message}"
            )
    return {
        "version": blocklist.version,
        "items": len(blocklist.items),
        "entities": len(blocklist.entities),
    }


def status(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> CommandOutput:
    """Status of everything; its code is 3 where something is not well."""
    from precompute.cli.status_report import LOCATION_VARIABLES, read_state, report
    from precompute.cli.status_table import render_status

    is_placed = (
        arguments.config or arguments.artifacts or any(map(os.environ.get, LOCATION_VARIABLES))
    )
    status_report = report(config, read_state(config), has_settings=bool(is_placed))
    code = 0 if status_report["well"] else NOT_WELL
    if arguments.json:
        return CommandOutput(json_text(status_report), code)
    return CommandOutput(render_status(status_report), code)
