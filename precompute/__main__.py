"""`python -m precompute`: every step of a night, and the whole night, from a shell."""

import argparse
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from cache.blocklist import change_blocklist, latest_blocklist
from cache.embedded import redis_url, running_server
from cache.errors import LarderError
from cache.keys import canonical_id
from precompute import pipeline
from precompute.build import Progress, quiet
from precompute.config import NightConfig, night_config
from precompute.control import Control, connect
from precompute.night import run_night
from precompute.release import Releases
from precompute.states import State
from precompute.training import train_reference

Command = Callable[[NightConfig, argparse.Namespace, Progress], dict[str, Any] | None]

out = Console()
err = Console(stderr=True, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 refused or failed with a reason, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        overrides = {
            name: getattr(arguments, name)
            for name in ("namespace", "artifacts", "state", "bundle", "shards")
        }
        config = night_config(arguments.config, **overrides)
        with _redis(config, arguments.redis) as config, _bars(arguments.quiet) as progress:
            found = arguments.run(config, arguments, progress)
    except LarderError as error:
        err.print(f"[red]{error.code}[/red]: ", end="")
        err.print(error.message, markup=False, highlight=False)
        return 1
    except OSError as error:
        err.print(f"this machine refused: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        err.print("interrupted; run the same command again to go on where it stopped")
        return 130
    if found is not None:
        _print(found)
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _redis(config: NightConfig, need: str) -> Iterator[NightConfig]:
    """The configured Redis, or one of our own for the life of this command, with what was published restored.

    A command that only tells replicas something joins a server that runs, and does without when there is none.
    """
    state = config.path(config.state)
    if config.redis_url or need == "none":
        yield config
    elif need == "if running":
        found = running_server(state)
        yield replace(config, redis_url=found.url if found else None)
    else:
        with redis_url(state, None) as url:
            ready = replace(config, redis_url=url)
            _fill(ready)
            yield ready


def _fill(config: NightConfig) -> None:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        releases = Releases(config.store(), Control(client, config.keyspace()))
        empty = releases.control.pointer() is None and releases.ledger().live is not None
    if empty:
        pipeline.restore(config, attempt=_attempt())


@contextmanager
def _bars(is_quiet: bool) -> Iterator[Progress]:
    if is_quiet or not err.is_terminal:
        yield quiet
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield progress


def _print(found: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    out.print(table)


def _attempt() -> str:
    return f"shell-{uuid.uuid4().hex[:12]}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _night(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    lines = run_night(
        config, data_until=arguments.data_until, run_after=_now(), attempt=arguments.attempt or _attempt(),
        progress=progress,
    )  # fmt: skip
    table = Table("step", "what", "seconds")
    for line in lines:
        table.add_row(line.step, line.what, f"{line.seconds:.2f}")
    table.add_section()
    table.add_row("night", lines[0].what, f"{sum(line.seconds for line in lines):.2f}")
    out.print(table)


def _train(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return train_reference(config, data_until=arguments.data_until, progress=progress)


def _begin(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.begin(
        config, data_until=arguments.data_until, run_after=_now(), progress=progress
    )


def _build(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"generation": arguments.generation}


def _score(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    build = _build(arguments)
    pipeline.embed_items(config, build, progress=progress)
    shards = range(config.shards) if arguments.shard is None else [arguments.shard]
    scored = [pipeline.score_shard(config, build, shard, progress=progress) for shard in shards]
    if arguments.shard is None:
        pipeline.assemble(config, build, scored)
    return {
        "shards": len(scored),
        "users": sum(each["users"] for each in scored),
        "items": sum(each["items"] for each in scored),
    }


def _index(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.build_index(config, _build(arguments), progress=progress)


def _quantize(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    found = pipeline.quantize(config, _build(arguments), progress=progress)
    return {name: each["agreement"] for name, each in found["models"].items()}


def _load(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    return pipeline.load(config, _build(arguments), progress=progress)


def _verify(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.verify(config, _build(arguments), attempt=_attempt(), progress=progress)


def _publish(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    return pipeline.publish(config, _build(arguments), attempt=arguments.attempt or _attempt())


def _warm(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    return pipeline.warm(config, _build(arguments))


def _roll_back(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    attempt = arguments.attempt or _attempt()
    return pipeline.roll_back(config, to=arguments.to, reason=arguments.reason, attempt=attempt)


def _retire(
    config: NightConfig, _arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.retire(config, attempt=_attempt(), progress=progress)


def _restore(
    config: NightConfig, _arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.restore(config, attempt=_attempt(), progress=progress)


def _pin(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        releases = Releases(config.store(), Control(client, config.keyspace()))
        if arguments.unpin:
            releases.unpin(arguments.generation, attempt=_attempt())
        else:
            expires_at = (
                None if arguments.days is None else releases.clock() + arguments.days * 86_400
            )
            releases.pin(
                arguments.generation,
                reason=arguments.reason,
                expires_at=expires_at,
                attempt=_attempt(),
            )
    return {"generation": arguments.generation, "pinned": not arguments.unpin}


def _block(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    items = [canonical_id(each) for each in arguments.item]
    entities = [canonical_id(each) for each in arguments.entity]
    if arguments.unblock:
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


def _status(config: NightConfig, _arguments: argparse.Namespace, _progress: Progress) -> None:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        releases = Releases(config.store(), Control(client, config.keyspace()))
        pointer, ledger = releases.control.pointer(), releases.ledger()
        known = set(releases.store.names("generations")) | set(releases.control.rows())
        table = Table(
            "generation", "state", "gates", "notes", title=f"namespace {config.namespace}"
        )
        for generation in sorted(known, reverse=True):
            notes = [
                "live" if pointer is not None and pointer.generation == generation else "",
                "previous" if ledger.previous == generation else "",
                "pinned" if ledger.is_pinned(generation, releases.clock()) else "",
            ]
            table.add_row(
                generation,
                str(releases.state(generation, ledger) or State.BEGUN),
                _gates(config, generation),
                " ".join(each for each in notes if each),
            )
        replicas = releases.control.replicas()
    out.print(table)
    out.print(
        f"epoch {pointer.epoch}"
        if pointer
        else "Redis has no pointer: nothing published, or lost (restore)"
    )
    out.print(
        f"{len(replicas)} replicas, blocklist version {latest_blocklist(config.store()).version}"
    )


def _gates(config: NightConfig, generation: str) -> str:
    from cache.artefacts import read_manifest

    try:
        gates = read_manifest(config.store(), generation).gates
    except LarderError:
        return "-"
    failed = [str(gate["rule"]) for gate in gates if not gate["passed"]]
    return (
        f"failed: {', '.join(failed)}" if failed else f"{len(gates)} passed" if gates else "not run"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m precompute",
        description="Precompute predictions for every known entity and publish them as one generation.",
        epilog="Settings: a TOML file (--config or LARDER_CONFIG), then LARDER_ARTIFACTS, LARDER_NAMESPACE, "
        "LARDER_STATE and REDIS_URL. Without REDIS_URL a server of our own runs for the life of the command.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the night's settings")
    parser.add_argument("--namespace", help="keeps several Larders apart in one Redis")
    parser.add_argument(
        "--artifacts", metavar="URL", type=_place, help="artefact store: a folder or an fsspec URL"
    )
    parser.add_argument(
        "--state", metavar="DIR", type=_place, help="this host's own files (default .larder)"
    )
    parser.add_argument("--bundle", metavar="DIR", type=_place, help="the model bundle")
    parser.add_argument("--shards", type=int, help="hash ranges to score separately")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Command, text: str, *, generation: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, redis="own")
        if generation:
            command.add_argument(
                "generation", help="generation id, as `begin` and `status` print it"
            )
        return command

    for name, run, text in (
        (
            "night",
            _night,
            "the whole night: begin, score, index, load, verify, publish, warm, retire",
        ),
        ("train", _train, "train the reference bundle on the configured sources"),
        ("begin", _begin, "name the generation, pin its inputs, partition the sources"),
    ):
        command = add(name, run, text)
        command.add_argument(
            "--data-until", metavar="TIME", help="cut of the data, ISO 8601 (default: now)"
        )
        command.add_argument("--attempt", help="name of this attempt; a repeat is recognised by it")
        if name == "train":
            command.set_defaults(redis="none")
    add("score", _score, "score all shards, or one", generation=True).add_argument(
        "--shard", type=int
    )
    add("index", _index, "build the FAISS indexes", generation=True)
    add("quantize", _quantize, "make and compare the int8 models", generation=True)
    add("load", _load, "stream the pages into Redis", generation=True)
    add("verify", _verify, "run the gates", generation=True)
    add("publish", _publish, "make a verified generation live", generation=True).add_argument(
        "--attempt"
    )
    add("warm", _warm, "wait until every replica answers from it", generation=True)
    command = add("roll-back", _roll_back, "make an earlier generation live again")
    command.add_argument("--to", metavar="GENERATION", help="default: the previous one")
    command.add_argument("--reason", required=True, help="kept in the release record")
    command.add_argument("--attempt")
    add("retire", _retire, "remove generations that nobody needs")
    add("restore", _restore, "rebuild a lost Redis from the artefact store")
    command = add("pin", _pin, "keep a generation from being retired", generation=True)
    command.add_argument("--reason", required=True)
    command.add_argument("--days", type=float, help="how long (default: until unpinned)")
    command.set_defaults(unpin=False)
    add("unpin", _pin, "lift a pin", generation=True).set_defaults(unpin=True)
    for name, text in (("block", "never serve these"), ("unblock", "serve these again")):
        command = add(name, _block, f"{text}; effective within seconds")
        command.add_argument("--item", action="append", default=[], metavar="ID")
        command.add_argument("--entity", action="append", default=[], metavar="ID")
        command.set_defaults(unblock=name == "unblock", redis="if running")
    add("status", _status, "generations, their states and gates, replicas")
    return parser


def _place(text: str) -> str:
    """A path on the command line is relative to the current folder."""
    return text if "://" in text else str(Path(text).absolute())


if __name__ == "__main__":
    sys.exit(main())
