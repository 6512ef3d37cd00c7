"""Commands of the shell, a function for each; a step without a function here runs as in a night.

Each function imports its own libraries when it runs, which other commands do not need.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from cache.control.control_keys import Control
from cache.control.states import fold_releases
from cache.errors import ConfigError, Conflict, LarderError
from cache.format.directory import Directory
from cache.format.ids import canonical_id, hash_id
from cache.l2.sync_clients import connect
from cache.process.command_line import FOUND_PROBLEM_EXIT_CODE, json_text
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path, read_manifest
from cache.store.audit import AuditedAction, AuditRecord, audit_records, audited, describe_blocked_ids, entity_digest
from cache.store.blocklist import Blocklist, change_blocklist, latest_blocklist
from cache.store.releases import all_releases
from precompute.builds.night_failure import note_failure_of_step
from precompute.builds.reports import BegunBuild, BuildId
from precompute.config.console import CommandOutput, OutputContent, err_console, iso
from precompute.config.progress import Progress, size_text
from precompute.config.settings import NightConfig
from precompute.releases.moves import new_attempt
from precompute.releases.release_log import demand_reason, open_releases
from precompute.steps.night import Night, find_step, run_night


def step(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> Mapping[str, Any]:
    """Run the step of a night with this name."""
    attempt_name = getattr(arguments, "attempt", None) or new_attempt()
    generation = getattr(arguments, "generation", "")
    night = Night(config, attempt_name, progress=progress, generation=generation)
    return find_step(arguments.step)(night).step_result


def _build_id(arguments: argparse.Namespace) -> BuildId:
    return {"generation": arguments.generation}


def begin(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> BegunBuild:
    """Name a generation and pin its inputs."""
    from precompute.steps import begin as begin_step

    return begin_step.run(
        config, data_until=arguments.data_until, run_after=None,
        named=inputs_change_name(config, arguments.data_until), events_until=arguments.events_until,
        progress=progress,
    )  # fmt: skip


def inputs_change_name(config: NightConfig, data_until: str | None) -> str:
    """Return the name of a night without a cut: the last change of its inputs, so that a repeat continues it.

    If that is in the future, since the clock of a file's writer was ahead, `begin` takes Redis' time instead.
    """
    from precompute.bundles.bundle_store import chosen_bundle_handed_over_at
    from precompute.sources.files import all_input_files, modified_at

    # a bundle of item vectors is made from other inputs
    bundle_at = 0.0 if config.sources.item_vectors else chosen_bundle_handed_over_at(config)
    if data_until or config.data_until or not config.sources.names_users or bundle_at is None:
        return datetime.now(UTC).isoformat(timespec="seconds")  # the name is not used, or `begin` raises an error
    latest_change_at = max(bundle_at, *map(modified_at, all_input_files(config)))
    return datetime.fromtimestamp(int(latest_change_at), UTC).isoformat()


def score(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Score all shards and assemble them; or score one shard only."""
    from precompute.steps import assemble, embed_items
    from precompute.steps import score as score_step

    build = _build_id(arguments)
    embed_items.run(config, build, progress=progress)
    shards = range(config.shards) if arguments.shard is None else [arguments.shard]
    shard_results = score_step.run(config, build, shards, progress=progress)
    if arguments.shard is None:
        assemble.run(config, build)
    return {
        "shards": len(shard_results),
        "users": sum(shard_counts["users"] for shard_counts in shard_results),
        "items": sum(shard_counts["items"] for shard_counts in shard_results),
    }


def quantize(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Quantize the models; return the agreement of the int8 models with the fp32 ones."""
    from precompute.steps import quantize as quantize_step

    quantize_report = quantize_step.run(config, _build_id(arguments), progress=progress)
    return {name: model_report["agreement"] for name, model_report in quantize_report["models"].items()}


def warm(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> Mapping[str, Any]:
    """Wait for every replica; raise Conflict if the generation is not live, or if replicas are not ready in time."""
    from precompute.steps import warm as warm_step

    generation = arguments.generation
    with connect(config.redis_url, config.redis_timeout_s) as client:
        pointer = Control(client, config.keyspace()).read_pointer()
    if pointer is None or pointer.generation != generation:
        live_text = "nothing is live" if pointer is None else f"{pointer.generation} is"
        raise Conflict(f"{generation} is not live, {live_text}: publish it before waiting for replicas")
    warm_report = warm_step.run(config, _build_id(arguments))
    if waiting_replicas := warm_report["waiting"]:
        raise Conflict(
            f"{len(waiting_replicas)} of {warm_report['replicas']} replicas do not answer from {generation} after "
            f"{config.warm_timeout_s:g} s: {', '.join(waiting_replicas)}; look at their logs and /readyz, or raise "
            "warm_timeout_s",
            waiting=waiting_replicas,
        )
    return warm_report


def night(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """Run the whole night; return a table with one row per step."""
    data_until, attempt = arguments.data_until, arguments.attempt or new_attempt()
    with note_failure_of_step(config, "begin", None):
        generation_name = inputs_change_name(config, data_until)
    night = Night(config, attempt, data_until, named=generation_name, progress=progress)
    finished_steps = run_night(night, arguments.until)
    if arguments.json:
        return {
            "generation": finished_steps[0][1].step_result["generation"],
            "seconds": round(sum(seconds for _, _, seconds in finished_steps), 3),
            "steps": [
                {
                    "step": step,
                    "what": row.result_summary.replace("\n", "; "),
                    "seconds": round(seconds, 3),
                    "size_bytes": row.size_bytes,
                }
                for step, row, seconds in finished_steps
            ],
        }
    table = Table("step", "what", "seconds", "rate", "size")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for step, row, seconds in finished_steps:
        size_cell = size_text(row.size_bytes) if row.size_bytes else ""
        step_summary = escape(row.result_summary)
        table.add_row(step.replace("_", " "), step_summary, f"{seconds:.2f}", row.rate_text(seconds), size_cell)
    table.add_section()
    table.add_row(
        "night",
        finished_steps[0][1].step_result["generation"],
        f"{sum(seconds for _, _, seconds in finished_steps):.2f}",
    )
    generation = finished_steps[0][1].step_result["generation"]
    if finished_steps[-1][0] == "verify":
        publish_hint = (
            f"{generation} is verified, but not published: `larder canary start {generation}` sends it a share of the "
            f"requests, `larder publish {generation}` publishes it."
        )
        return [table, publish_hint]
    return [table]


def hand_over_bundle(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Put a bundle into the store, for all nights from now on."""
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import hand_over

    handed_over_bundle = Bundle.open(config.path(arguments.folder))
    progress("hand over", 0, 1)
    hand_over(config.store(), handed_over_bundle)
    progress("hand over", 1, 1)
    return {
        "bundle": handed_over_bundle.name,
        "version": handed_over_bundle.version,
        "digest": handed_over_bundle.digest,
    }


def roll_back(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Make an earlier generation live again."""
    from precompute.releases.recovery import roll_back as move_back

    attempt = arguments.attempt or new_attempt()
    return move_back(config, target_generation=arguments.to, reason=arguments.reason, attempt=attempt)


def restore(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Rebuild a lost Redis from the store, or make a Redis with an unknown pointer follow the store."""
    from precompute.releases.recovery import adopt
    from precompute.releases.recovery import restore as restore_redis

    if arguments.adopt:
        return adopt(
            config, reason=arguments.reason, attempt=new_attempt(), accepts_empty=arguments.empty, progress=progress
        )
    return restore_redis(config, attempt=new_attempt(), progress=progress)


def pin(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Pin a generation, or remove its pin."""
    with open_releases(config) as releases:
        if arguments.unpin:
            if arguments.generation not in releases.ledger().pin_expiry_by_generation:
                raise Conflict(f"{arguments.generation} is not pinned: `status` lists pinned generations")
            releases.unpin(arguments.generation, attempt=new_attempt())
        else:
            pin_days, reason = arguments.days, demand_reason("a pin", arguments.reason)
            if pin_days is not None and not 0 < pin_days < math.inf:
                raise ConfigError(f"--days must be a number above 0, not {pin_days:g}", field="days")
            expires_at = None if pin_days is None else releases.clock() + pin_days * 86_400
            releases.pin(arguments.generation, reason=reason, expires_at=expires_at, attempt=new_attempt())
    return {"generation": arguments.generation, "pinned": not arguments.unpin}


def block(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Block or unblock ids and notify replicas if a Redis is reachable; or list blocked ids."""
    from precompute.sources.erasures import demand_unerased, describe_erased_users

    if arguments.list:
        return _blocklist_to_json(latest_blocklist(config.store()))
    item_ids = [canonical_id(item_id) for item_id in arguments.item]
    entity_ids = [canonical_id(entity_id) for entity_id in arguments.entity]
    store = config.store()
    remarks = (
        describe_erased_users(store, entity_ids) if arguments.unblock else _remarks_on_unknown_items(store, item_ids)
    )
    action: AuditedAction = "unblock" if arguments.unblock else "block"
    subject, reason = describe_blocked_ids(item_ids, entity_ids), arguments.reason
    with audited(store, action, subject, actor=config.actor, reason=reason) as audit_details:
        if arguments.unblock:
            demand_unerased(store, item_ids)
            blocklist = change_blocklist(store, unblock_items=item_ids, unblock_entities=entity_ids)
        else:
            blocklist = change_blocklist(store, block_items=item_ids, block_entities=entity_ids)
        audit_details["version"] = blocklist.version
    if config.redis_url:
        try:
            with connect(config.redis_url, config.redis_timeout_s, namespace=config.namespace) as client:
                Control(client, config.keyspace()).announce("blocklist")
        except LarderError as error:
            err_console.print(f"replicas will see the change at their next poll, since {error.message}")
    return {
        "version": blocklist.version,
        "items": len(blocklist.items),
        "entities": len(blocklist.entities),
        **({"notes": remarks} if remarks else {}),
    }


def _blocklist_to_json(blocklist: Blocklist) -> dict[str, Any]:
    return {
        "version": blocklist.version,
        "items": sorted(raw_id.decode() for raw_id in blocklist.items),
        "entities": sorted(raw_id.decode() for raw_id in blocklist.entities),
        "erased_users": len(blocklist.users),
    }


def _remarks_on_unknown_items(store: ArtefactStore, item_ids: Sequence[bytes]) -> list[str]:
    """Return remarks on blocked ids that are not items of the live generation: they may be mistyped."""
    live_generation = fold_releases(all_releases(store)).live_generation
    if not item_ids or live_generation is None:
        return []
    try:
        manifest = read_manifest(store, live_generation)
        entity_set = manifest.entity_sets.get("item")
        if entity_set is None:
            return []
        for part in entity_set.parts:
            fetch_checked(store, live_generation, part.file)
        directory = Directory.open(store.local(generation_path(live_generation)), entity_set)
    except LarderError:
        return []
    return [
        f"the live generation {live_generation} has no item {item_id.decode()!r}: is the id right? It stays blocked"
        for item_id in item_ids
        if directory.find_position(hash_id(item_id, directory.seed)) < 0
    ]


def status(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> CommandOutput:
    """Report the status of everything; the exit code is 3 if there is a problem."""
    from precompute.cli.status import LOCATION_VARIABLES, read_state, render_status, report_status

    is_located = arguments.config or arguments.artifacts or any(map(os.environ.get, LOCATION_VARIABLES))
    status_report = report_status(config, read_state(config), has_settings=bool(is_located))
    exit_code = 0 if status_report["well"] else FOUND_PROBLEM_EXIT_CODE
    if arguments.json:
        return CommandOutput(json_text(status_report), exit_code)
    return CommandOutput(render_status(status_report), exit_code)


def audit(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> OutputContent | CommandOutput:
    """List all audit records, or those since a time or about one entity."""
    earliest_at = 0.0 if arguments.since is None else _parse_time(arguments.since)
    subject_digest = "" if arguments.entity is None else entity_digest(canonical_id(arguments.entity))
    store = config.store()
    all_records = audit_records(store)
    records = [
        record
        for record in all_records
        # An unreadable record has no time, so it is always listed.
        if (record.at >= earliest_at or record.outcome in ("missing", "unreadable"))
        and subject_digest in record.subject
    ]
    if arguments.json:
        return CommandOutput(json_text(list(map(asdict, records))))
    if records:
        return [_audit_table(records)]
    if all_records:
        return [f"none of the {len(all_records)} audit records in {store.url} matches"]
    return [f"{store.url} has no audit record; if there should be some, is the store mounted there?"]


def _parse_time(time_text: str) -> float:
    try:
        parsed_time = datetime.fromisoformat(time_text)
    except ValueError:
        raise ConfigError(f"--since must be a time in ISO 8601, not {time_text!r}", field="since") from None
    return (parsed_time if parsed_time.tzinfo else parsed_time.replace(tzinfo=UTC)).timestamp()


def _audit_table(records: list[AuditRecord]) -> Table:
    table = Table("number", "time", "who", "what", "of", "why", "ended")
    table.columns[4].overflow = "fold"  # ids are never truncated
    for record in records:
        outcome_text = f"{record.outcome}: {record.error}" if record.error else record.outcome
        time_text = iso(record.at) if record.at else ""
        # a roll back without `--to` only records the generation here
        generation = str(record.found.get("generation", ""))
        table.add_row(
            str(record.number),
            time_text,
            record.actor,
            record.action,
            record.subject if generation in record.subject else f"{record.subject}: {generation}",
            record.reason,
            outcome_text,
        )
    return table
