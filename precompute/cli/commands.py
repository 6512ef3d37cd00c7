"""Commands of the shell, a function for each: what it does, and what it found to show."""

import argparse
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson
from rich.table import Table

from cache.errors import ConfigError, Conflict, LarderError
from cache.format.ids import canonical_id
from cache.store.blocklist import change_blocklist
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import chosen_at, hand_over
from precompute.cli.console import NOT_WELL, Found, Told, err
from precompute.cli.status_report import look, report
from precompute.cli.status_table import shown
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.control_keys import Control, connect
from precompute.erasures.erasure import demand_unerased
from precompute.releases.attempts import new_attempt
from precompute.releases.release import Releases
from precompute.sources.files import all_files, changed_at
from precompute.steps import pipeline
from precompute.steps.adopt import adopt
from precompute.steps.night import run_night
from precompute.steps.train import train_reference

Command = Callable[[NightConfig, argparse.Namespace, Progress], Found | Told]


def _standing_name(config: NightConfig, data_until: str | None) -> str:
    """Name of a night without a cut: when its inputs last changed, so that a repeat finds its own work."""
    bundle_at = chosen_at(config)
    if data_until or config.data_until or not config.sources.interactions or bundle_at is None:
        return datetime.now(UTC).isoformat(timespec="seconds")  # not the name, or an error soon
    newest = max(bundle_at, *map(changed_at, all_files(config)))
    return datetime.fromtimestamp(int(newest), UTC).isoformat()


def night(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> Found:
    """The whole night; one row per step."""
    lines = run_night(
        config, data_until=arguments.data_until, named=_standing_name(config, arguments.data_until),
        attempt=arguments.attempt or new_attempt(), progress=progress,
    )  # fmt: skip
    table = Table("step", "what", "seconds", "rate", "size")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for line in lines:
        table.add_row(line.step, line.what, f"{line.seconds:.2f}", line.rate, line.size)
    table.add_section()
    table.add_row("night", lines[0].what, f"{sum(line.seconds for line in lines):.2f}")
    return [table]


def train(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The reference bundle, trained on the configured sources."""
    return train_reference(config, data_until=arguments.data_until, progress=progress)


def hand_over_bundle(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """A bundle put into the store, which all nights use from now on."""
    bundle = Bundle.open(config.path(arguments.folder))
    progress("hand over", 0, 1)
    hand_over(config.store(), bundle)
    progress("hand over", 1, 1)
    return {"bundle": bundle.name, "version": bundle.version, "digest": bundle.digest}


def begin(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A generation named, its inputs pinned."""
    return pipeline.begin(
        config, data_until=arguments.data_until, run_after=None,
        named=_standing_name(config, arguments.data_until), progress=progress,
    )  # fmt: skip


def _build(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"generation": arguments.generation}


def score(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All shards, assembled; or one of them alone."""
    build = _build(arguments)
    pipeline.embed_items(config, build, progress=progress)
    shards = range(config.shards) if arguments.shard is None else [arguments.shard]
    scored = pipeline.score_shards(config, build, shards, progress=progress)
    if arguments.shard is None:
        pipeline.assemble(config, build, scored)
    return {
        "shards": len(scored),
        "users": sum(each["users"] for each in scored),
        "items": sum(each["items"] for each in scored),
    }


def index(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The FAISS indexes."""
    return pipeline.build_index(config, _build(arguments), progress=progress)


def quantize(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """The int8 models; their agreement with the others."""
    found = pipeline.quantize(config, _build(arguments), progress=progress)
    return {name: each["agreement"] for name, each in found["models"].items()}


def load(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The pages into Redis."""
    return pipeline.load(config, _build(arguments), progress=progress)


def verify(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """The gates' verdicts."""
    return pipeline.verify(config, _build(arguments), attempt=new_attempt(), progress=progress)


def publish(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """A verified generation made live."""
    attempt = arguments.attempt or new_attempt()
    return pipeline.publish(config, _build(arguments), attempt=attempt, progress=progress)


def warm(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Waits for every replica; Conflict for what is not live, and when some still wait in the end."""
    generation = arguments.generation
    with connect(config.redis_url, config.redis_timeout_s) as client:
        pointer = Control(client, config.keyspace()).pointer()
    if pointer is None or pointer.generation != generation:
        live = "nothing is live" if pointer is None else f"{pointer.generation} is"
        raise Conflict(f"{generation} is not live, {live}: publish it before waiting for replicas")
    found = pipeline.warm(config, _build(arguments))
    if waiting := found["waiting"]:
        raise Conflict(
            f"after {config.warm_timeout_s:g} s {len(waiting)} of {found['replicas']} replicas do not answer from "
            f"{generation}: {', '.join(waiting)}; look at their logs and /readyz, or raise warm_timeout_s",
            waiting=waiting,
        )
    return found


def roll_back(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    """An earlier generation made live again."""
    attempt = arguments.attempt or new_attempt()
    return pipeline.roll_back(config, to=arguments.to, reason=arguments.reason, attempt=attempt)


def retire(
    config: NightConfig, _arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Removes what nobody needs."""
    return pipeline.retire(config, attempt=new_attempt(), progress=progress)


def restore(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """A lost Redis rebuilt from the store, or a strange one made to follow it."""
    if arguments.adopt:
        return adopt(config, reason=arguments.reason, attempt=new_attempt(), progress=progress)
    return pipeline.restore(config, attempt=new_attempt(), progress=progress)


def pin(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Pins, or lifts a pin."""
    with connect(config.redis_url, config.redis_timeout_s) as client:
        releases = Releases(config.store(), Control(client, config.keyspace()))
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
    items = [canonical_id(each) for each in arguments.item]
    entities = [canonical_id(each) for each in arguments.entity]
    if arguments.unblock:
        demand_unerased(config.store(), items)
        changed = change_blocklist(config.store(), unblock_items=items, unblock_entities=entities)
    else:
        changed = change_blocklist(config.store(), block_items=items, block_entities=entities)
    if config.redis_url:
        try:
            with connect(config.redis_url, config.redis_timeout_s) as client:
                Control(client, config.keyspace()).announce("blocklist")
        except LarderError as error:
            err.print(f"replicas will see the change at their next poll, since {error.message}")
    return {
        "version": changed.version,
        "items": len(changed.items),
        "entities": len(changed.entities),
    }


def status(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> Told:
    """Status of everything; its code is 3 where something is not well."""
    told = report(config, look(config))
    code = 0 if told["well"] else NOT_WELL
    if arguments.json:
        return Told(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode(), code)
    return Told(shown(told), code)
