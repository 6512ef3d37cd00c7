"""`python -m precompute`: every step of a night, and the whole night, from a shell."""

import os
import signal

if __name__ == "__main__":
    # The libraries below take a second or two to load; until then an interrupt has nothing to undo.
    signal.signal(
        signal.SIGINT, lambda *_: (os.write(2, b"interrupted; nothing was begun\n"), os._exit(130))
    )

import argparse
import atexit
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from cache.blocklist import change_blocklist, latest_blocklist
from cache.embedded import redis_url, running_server
from cache.errors import LarderError
from cache.keys import canonical_id
from precompute import pipeline
from precompute.build import Progress
from precompute.config import NightConfig, night_config
from precompute.control import Control, connect
from precompute.display import Found, bars_on, show
from precompute.night import run_night
from precompute.release import Releases
from precompute.sources import source_files
from precompute.states import ALLOWED, State
from precompute.training import train_reference

Command = Callable[[NightConfig, argparse.Namespace, Progress], Found]

out = Console()
err = Console(stderr=True, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 refused or failed with a reason, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        _on_interrupt(_interrupt)
        overrides = {
            name: getattr(arguments, name)
            for name in ("namespace", "artifacts", "state", "bundle", "shards")
        }
        config = night_config(arguments.config, **overrides)
        with (
            bars_on(err, is_quiet=arguments.quiet) as progress,
            _redis(config, arguments, progress) as config,
        ):
            found = arguments.run(config, arguments, progress)
        show(found, out)
    except KeyboardInterrupt:
        err.print("interrupted; run the same command again to go on where it stopped")
        return 130
    except Exception as error:
        _on_interrupt(_end)
        _explain(error, debug=arguments.debug)
        return 1
    return 0


def _explain(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    match error:
        case LarderError():
            err.print(f"[red]{error.code}[/red]: ", end="")
            err.print(error.message, markup=False, highlight=False)
        case OSError():
            err.print(f"this machine refused: {error}", markup=False)
        case _:
            text = f"internal error: {type(error).__name__}: {error}".rstrip(": ")
            more = "" if debug else "; run with --debug for the traceback"
            err.print(f"{text}{more}", markup=False, highlight=False)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # While the first is being honoured (a tile finishes, the server stops) a second one ends at once;
    # the server's guard then takes it along.
    _on_interrupt(_end)
    raise KeyboardInterrupt


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


@contextmanager
def _redis(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> Iterator[NightConfig]:
    """The configured Redis, or one of our own for the life of this command, with what the command needs in it.

    A command that only tells replicas something joins a server that runs, and does without when there is none.
    """
    state, need = config.path(config.state), arguments.redis
    if config.redis_url or need == "none":
        yield config
    elif need == "if running":
        found = running_server(state)
        yield replace(config, redis_url=found.url if found else None)
    else:
        is_new = running_server(state) is None
        with redis_url(state, None) as url:
            ready = replace(config, redis_url=url)
            _fill(ready, progress)
            if is_new:
                arguments.prepare(ready, arguments, progress)
            yield ready


def _fill(config: NightConfig, progress: Progress) -> None:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        releases = Releases(config.store(), Control(client, config.keyspace()))
        empty = releases.control.pointer() is None and releases.ledger().live is not None
    if empty:
        pipeline.restore(config, attempt=_attempt(), progress=progress)


def _nothing(_config: NightConfig, _arguments: argparse.Namespace, _progress: Progress) -> None:
    """What most commands need of a new server beyond what was published."""


def _load_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """The pages of the generation that a step is about: the server that held them ended with its command."""
    name = "to" if arguments.run is _roll_back else "generation"
    if (generation := getattr(arguments, name)) and _state(config, generation) in _LOADABLE:
        pipeline.load(config, {"generation": generation}, progress=progress)


def _verify_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """The registry of the server that knew about an earlier `verify` is gone: the gates speak again."""
    _load_again(config, arguments, progress)
    # A refused or rolled-back one is lifted by `verify` alone, never on the way to a publish.
    if _state(config, arguments.generation) in (State.LOADED, State.VERIFIED):
        pipeline.verify(config, _build(arguments), attempt=_attempt(), progress=progress)


_LOADABLE = (*ALLOWED["load"], State.SUPERSEDED, None)


def _state(config: NightConfig, generation: str) -> State | None:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        return Releases(config.store(), Control(client, config.keyspace())).state(generation)


def _attempt() -> str:
    return f"shell-{uuid.uuid4().hex[:12]}"


def _standing_cut(config: NightConfig, data_until: str | None) -> str:
    """The cut of a night that names none: when its inputs last changed, so that a repeat finds its own work."""
    bundle = config.path(config.bundle) / "bundle.json"
    sources = config.sources
    if data_until or config.data_until or not sources.interactions or not bundle.is_file():
        return datetime.now(UTC).isoformat(timespec="seconds")  # not the cut, or an error soon
    features = [each for each in (sources.user_features, sources.item_features) if each]
    files = [*source_files([*sources.interactions, *features], config.path(".")), bundle]
    newest = max(path.stat().st_mtime for path in files)
    return datetime.fromtimestamp(int(newest), UTC).isoformat()


def _night(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> Found:
    lines = run_night(
        config, data_until=arguments.data_until, run_after=_standing_cut(config, arguments.data_until),
        attempt=arguments.attempt or _attempt(), progress=progress,
    )  # fmt: skip
    table = Table("step", "what", "seconds", "rate", "size")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for line in lines:
        table.add_row(line.step, line.what, f"{line.seconds:.2f}", line.rate, line.size)
    table.add_section()
    table.add_row("night", lines[0].what, f"{sum(line.seconds for line in lines):.2f}")
    return [table]


def _train(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return train_reference(config, data_until=arguments.data_until, progress=progress)


def _begin(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    return pipeline.begin(
        config, data_until=arguments.data_until, run_after=_standing_cut(config, arguments.data_until),
        progress=progress,
    )  # fmt: skip


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


def _status(config: NightConfig, _arguments: argparse.Namespace, _progress: Progress) -> Found:
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
    return [
        table,
        f"epoch {pointer.epoch}"
        if pointer
        else "Redis has no pointer: nothing published, or lost (restore)",
        f"{len(replicas)} replicas, blocklist version {latest_blocklist(config.store()).version}",
    ]


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
        "LARDER_STATE and REDIS_URL. Without REDIS_URL a server of our own runs for the life of the command, or "
        "that of a running `make serve` is joined. Single steps keep their state in Redis: with REDIS_URL set "
        "they need not load their generation again each time.",
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
    parser.add_argument("--debug", action="store_true", help="tracebacks of errors")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Command, text: str, *, generation: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, redis="own", prepare=_nothing)
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
        default = (
            "use all"
            if name == "train"
            else "data_until of the settings, else use all and name the generation after the newest change of an input "
            "file, so that a repeat goes on where this one stopped"
        )
        command.add_argument(
            "--data-until", metavar="TIME", help=f"cut of the data, ISO 8601 (default: {default})"
        )
        command.add_argument("--attempt", help="name of this attempt; a repeat is recognised by it")
        if name == "train":
            command.set_defaults(redis="none")
    command = add("score", _score, "score all shards, or one", generation=True)
    command.add_argument("--shard", type=int)
    command.set_defaults(redis="none")
    for name, run, text in (
        ("index", _index, "build the FAISS indexes"),
        ("quantize", _quantize, "make and compare the int8 models"),
    ):
        add(name, run, text, generation=True).set_defaults(redis="none")
    add("load", _load, "stream the pages into Redis", generation=True)
    add("verify", _verify, "run the gates", generation=True).set_defaults(prepare=_load_again)
    command = add("publish", _publish, "make a verified generation live", generation=True)
    command.add_argument("--attempt")
    command.set_defaults(prepare=_verify_again)
    add("warm", _warm, "wait until every replica answers from it", generation=True)
    command = add("roll-back", _roll_back, "make an earlier generation live again")
    command.set_defaults(prepare=_load_again)
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
    code = main()
    _on_interrupt(_end)  # a thread that hangs can still be left behind
    atexit.register(_on_interrupt, signal.SIG_IGN)  # what is left is over in a moment
    sys.exit(code)
