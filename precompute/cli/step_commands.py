"""Commands of the steps of a night; a step without a function here is run as a night runs it.

A step's module is imported by the command that runs it: each brings libraries that the others do without.
"""

import argparse
from datetime import UTC, datetime
from typing import Any

from cache.errors import Conflict
from precompute.builds.night import Night
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control, connect
from precompute.operations.night import step_in_night
from precompute.releases.attempts import new_attempt


def step(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A step as a night runs it, by its name there."""
    attempt = getattr(arguments, "attempt", None) or new_attempt()
    build = _build(arguments) if "generation" in arguments else {}
    return step_in_night(arguments.step)(
        Night(config, attempt, progress=progress, build=build)
    ).result


def _build(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"generation": arguments.generation}


def standing_name(config: NightConfig, data_until: str | None) -> str:
    """Name of a night without a cut: when its inputs last changed, so that a repeat finds its own work.

    `begin` takes the time of Redis instead where that has not come yet: the clock of whoever wrote a file was ahead.
    """
    from precompute.bundles.bundle_store import chosen_at
    from precompute.sources.files import all_files, changed_at

    bundle_at = 0.0 if config.sources.item_vectors else chosen_at(config)  # else it is an input
    if data_until or config.data_until or not config.sources.names_users or bundle_at is None:
        return datetime.now(UTC).isoformat(timespec="seconds")  # not the name, or an error soon
    latest_change_at = max(bundle_at, *map(changed_at, all_files(config)))
    return datetime.fromtimestamp(int(latest_change_at), UTC).isoformat()


def begin(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A generation named, its inputs pinned."""
    from precompute.steps import begin as begin_step

    return begin_step.run(
        config, data_until=arguments.data_until, run_after=None,
        named=standing_name(config, arguments.data_until), events_until=arguments.events_until,
        progress=progress,
    )  # fmt: skip


def take_events(
    config: NightConfig, _arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    """The stream's new events, as files in the store."""
    from precompute.steps import take_events as take_events_step

    return take_events_step.run(config)


def score(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All shards, assembled; or one of them alone."""
    from precompute.steps import assemble, embed_items
    from precompute.steps import score as score_step

    build = _build(arguments)
    embed_items.run(config, build, progress=progress)
    shards = range(config.shards) if arguments.shard is None else [arguments.shard]
    scored = score_step.run(config, build, shards, progress=progress)
    if arguments.shard is None:
        assemble.run(config, build)
    return {
        "shards": len(scored),
        "users": sum(shard_counts["users"] for shard_counts in scored),
        "items": sum(shard_counts["items"] for shard_counts in scored),
    }


def quantize(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """The int8 models' agreement with the others."""
    from precompute.steps import quantize as quantize_step

    quantize_report = quantize_step.run(config, _build(arguments), progress=progress)
    return {
        name: model_report["agreement"] for name, model_report in quantize_report["models"].items()
    }


def warm(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Waits for every replica; Conflict for what is not live, and when some still wait in the end."""
    from precompute.steps import warm as warm_step

    generation = arguments.generation
    with connect(config.redis_url, config.redis_timeout_s) as client:
        pointer = Control(client, config.keyspace()).pointer()
    if pointer is None or pointer.generation != generation:
        live = "nothing is live" if pointer is None else f"{pointer.generation} is"
        raise Conflict(f"{generation} is not live, {live}: publish it before waiting for replicas")
    warm_report = warm_step.run(config, _build(arguments))
    if waiting := warm_report["waiting"]:
        raise Conflict(
            f"after {config.warm_timeout_s:g} s {len(waiting)} of {warm_report['replicas']} replicas do not answer "
            "from "
            f"{generation}: {', '.join(waiting)}; look at their logs and /readyz, or raise warm_timeout_s",
            waiting=waiting,
        )
    return warm_report
