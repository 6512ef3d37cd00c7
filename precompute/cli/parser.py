"""The command line: what may be asked, and which command answers."""

import argparse
from pathlib import Path

from cache.config.timetable import NIGHT_STEPS
from precompute.cli.temporary_redis import load_again, prepare_nothing, verify_again
from precompute.config.console import CommandPlace
from precompute.evaluation import options as freshness
from precompute.planning import options as planning
from precompute.traffic import experiments

PROG = "python -m precompute"
INSIDE_SCORE = ("embed_items", "assemble")
"""Steps without a command: `score` runs them before and after its own."""
WORKLIST_IDS_SHOWN = 50
"""Ids that `worklist` shows where no limit is named."""


def parser_of_commands(prog: str = PROG) -> argparse.ArgumentParser:
    """Each command sets `run`, which Redis it needs, and how a new one is prepared; none is imported yet."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Precompute predictions for every known entity and publish them as one generation.",
        epilog="Settings: a TOML file (--config or LARDER_CONFIG), then LARDER_ARTIFACTS, LARDER_NAMESPACE, "
        "LARDER_STATE and REDIS_URL. Without REDIS_URL a server of our own runs for the life of the command, or "
        "that of a running `make serve` is joined. Single steps keep their state in Redis: with REDIS_URL set "
        "they need not load their generation again each time.",
    )
    _add_shared_options(parser)
    # Behind the command as well, without a default that would undo what stands before it.
    behind = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared_options(behind.add_argument_group("options of all commands"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command_path: str, text: str, *loads: str, generation: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[behind])
        command.set_defaults(
            run=CommandPlace(command_path, loads), redis="own", prepare=prepare_nothing
        )
        if generation:
            command.add_argument(
                "generation", help="generation id, as `begin` and `status` print it"
            )
        return command

    def add_step(
        name: str, text: str, *loads: str, command_path: str = ""
    ) -> argparse.ArgumentParser:
        resolved_path = command_path or "cli.commands.step"
        command = add(name, resolved_path, text, f"steps.{name}", *loads, generation=True)
        command.set_defaults(step=name)
        return command

    first = (
        (
            "night",
            "cli.commands.night",
            f"the whole night: {', '.join(NIGHT_STEPS).replace('_', ' ')}",
            tuple(f"steps.{step}" for step in NIGHT_STEPS),
        ),
        (
            "train",
            "cli.commands.train",
            "train the reference bundle on the configured sources",
            ("reference.train",),
        ),
        (
            "begin",
            "cli.commands.begin",
            "name the generation, pin its inputs, partition the sources",
            ("steps.begin",),
        ),
    )
    for name, command_path, text, loads in first:
        command = add(name, command_path, text, *loads)
        default = (
            "data_until of the settings, else use all"
            if name == "train"
            else "data_until of the settings, else use all and name the generation after the newest change of an input "
            "file, so that a repeat goes on where this one stopped"
        )
        command.add_argument(
            "--data-until", metavar="TIME", help=f"cut of the data, ISO 8601 (default: {default})"
        )
        command.add_argument("--attempt", help="name of this attempt; a repeat is recognised by it")
        if name == "night":
            command.add_argument(
                "--until",
                choices=NIGHT_STEPS,
                default=NIGHT_STEPS[-1],
                metavar="STEP",
                help="last step to run, such as verify for a generation that a canary is to try (default: retire)",
            )
        if name == "train":
            command.set_defaults(redis="none")
        if name == "begin":
            command.add_argument(
                "--events-until", metavar="POSITION",
                help="last event to read, as `take-events` tells it (default: all that were taken over)",
            )  # fmt: skip
    add(
        "take-events",
        "cli.commands.take_events",
        "write the stream's new events into the store, for `begin` to read",
        "steps.take_events",
        "events.taking",
    )
    command = add(
        "hand-over",
        "cli.commands.hand_over_bundle",
        "put a bundle into the store for the nights of all hosts",
        "bundles.bundle_store",
    )
    command.add_argument("folder", help="with bundle.json; relative to the configuration")
    command.set_defaults(redis="none")
    command = add_step(
        "score", "score all shards, or one", "steps.embed_items", "steps.assemble",
        command_path="cli.commands.score",
    )  # fmt: skip
    command.add_argument("--shard", type=int)
    command.set_defaults(redis="none")
    add_step("index", "build the FAISS indexes").set_defaults(redis="none")
    add_step(
        "quantize", "make and compare the int8 models", command_path="cli.commands.quantize"
    ).set_defaults(redis="none")
    add_step("load", "stream the pages into Redis")
    add_step("verify", "run the gates", "steps.load").set_defaults(prepare=load_again)
    command = add(
        "override",
        "cli.override.command",
        "let a refused generation pass one rule, with a reason",
        generation=True,
    )
    command.add_argument("--rule", required=True, help="the rule, as the refusal names it")
    command.add_argument(
        "--reason", required=True, help="kept in the release record and the manifest"
    )
    command = add_step("publish", "make a verified generation live", "steps.load", "steps.verify")
    command.add_argument("--attempt")
    command.set_defaults(prepare=verify_again)
    add_step("warm", "wait until every replica answers from it", command_path="cli.commands.warm")
    command = add(
        "canary",
        "traffic.canary.trial.command",
        "try a verified generation on a share of the requests, then publish or abandon it",
    )
    command.add_argument("action", choices=("start", "status", "publish", "abandon"))
    command.add_argument(
        "generation",
        nargs="?",
        help="to start with (default: the newest that is verified), or that publish or abandon must find running",
    )
    command.add_argument(
        "--percent",
        type=float,
        help="share of the requests (default: that of the canary that runs, else percent of [canary]); a change of it "
        "starts the counts anew",
    )
    command.add_argument("--reason", help="of abandon; kept in the release record")
    command.add_argument("--attempt")
    experiments.add_options(
        add("experiment", "traffic.experiment_command.command", experiments.DESCRIPTION)
    )
    command = add(
        "roll-back",
        "cli.commands.roll_back",
        "make an earlier generation live again",
        "steps.load",
    )
    command.set_defaults(prepare=load_again)
    command.add_argument("--to", metavar="GENERATION", help="default: the previous one")
    command.add_argument("--reason", required=True, help="kept in the release record")
    command.add_argument("--attempt")
    add(
        "retire", "cli.commands.step", "remove generations that nobody needs", "steps.retire"
    ).set_defaults(step="retire")
    command = add("restore", "cli.commands.restore", "rebuild a lost Redis from the artefact store")
    command.add_argument(
        "--adopt",
        action="store_true",
        help="also where Redis holds a pointer that no release record explains: the artefact store decides",
    )
    command.add_argument("--reason", help="of --adopt; kept in the release record")
    command = add(
        "pin", "cli.commands.pin", "keep a generation from being retired", generation=True
    )
    command.add_argument("--reason", required=True)
    command.add_argument("--days", type=float, help="how long (default: until unpinned)")
    command.set_defaults(unpin=False)
    add("unpin", "cli.commands.pin", "lift a pin", generation=True).set_defaults(unpin=True)
    for name, text in (("block", "never serve these"), ("unblock", "serve these again")):
        command = add(name, "cli.commands.block", f"{text}; effective within seconds")
        command.add_argument("--item", action="append", default=[], metavar="ID")
        command.add_argument("--entity", action="append", default=[], metavar="ID")
        command.add_argument("--reason", default="", help="kept in the audit log")
        command.set_defaults(unblock=name == "unblock", redis="if running")
    command = add(
        "erase",
        "erasure.command.erase",
        "block an entity at once, leave it out of every night from now on, and report when nothing holds it any more",
    )
    command.add_argument("entity", nargs="?", metavar="ENTITY", help="its id")
    command.add_argument(
        "--as", dest="kind", choices=("user", "item"), default="user", help="default: user"
    )
    command.add_argument("--list", action="store_true", help="all erasures, open and done")
    command.add_argument("--status", action="store_true", help="only show how this one stands")
    command.add_argument(
        "--forget", action="store_true", help="re-admit it to later nights and to answers"
    )
    command.add_argument(
        "--reason",
        help="why it is erased or re-admitted; kept in the audit log, and in the record of the latter",
    )
    command.add_argument(
        "--gone",
        metavar="HOST",
        help="a host, or a pattern of hosts, that will never run again: its copies hold no erasure up any more",
    )
    command.set_defaults(redis="if running")
    command = add(
        "status",
        "cli.commands.status",
        "generations with state, size, gates and pins, replicas, the next one expected; exit code 3 where not all is "
        "well, also without Redis",
    )
    command.set_defaults(redis="if running")
    command = add(
        "worklist",
        "usage.worklist.worklist",
        "ids that callers ask for and that no night knows, most asked first",
    )
    command.add_argument(
        "--limit", type=int, default=WORKLIST_IDS_SHOWN, help="shown (default: %(default)s)"
    )
    command.add_argument(
        "--export",
        metavar="FILE",
        type=_absolute_path,
        help="all of them as CSV: table, entity, reads, standing",
    )
    command.set_defaults(redis="if running")
    command = add(
        "audit",
        "cli.commands.audit",
        "who published, rolled back, overrode, blocked, erased or changed tokens, and how it ended",
    )
    command.add_argument("--since", metavar="TIME", help="ISO 8601, UTC unless it says otherwise")
    command.add_argument("--entity", metavar="ID", help="only what was done about this entity")
    command.set_defaults(redis="none")
    command = add("plan", "planning.command.plan", planning.DESCRIPTION)
    planning.add_options(command, CommandPlace("planning.options.plan_on_card"))
    command.set_defaults(redis="if running")
    command = add("freshness", "evaluation.freshness.command", freshness.DESCRIPTION)
    freshness.add_options(command)
    command.set_defaults(redis="none")
    for name in NIGHT_STEPS:
        if name not in commands.choices and name not in INSIDE_SCORE:
            add_step(name, f"run the step {name}")
    return parser


def _add_shared_options(to: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    to.add_argument("--config", metavar="FILE", help="TOML file with the night's settings")
    to.add_argument("--namespace", help="keeps several Larders apart in one Redis")
    to.add_argument(
        "--artifacts",
        metavar="URL",
        type=_absolute_path,
        help="artefact store: a folder or an fsspec URL",
    )
    to.add_argument(
        "--state",
        metavar="DIR",
        type=_absolute_path,
        help="this host's own files (default .larder)",
    )
    to.add_argument("--bundle", metavar="DIR", type=_absolute_path, help="the model bundle")
    to.add_argument("--shards", type=int, help="hash ranges to score separately")
    to.add_argument("--quiet", action="store_true", help="no progress bars")
    to.add_argument("--json", action="store_true", help="what was found, for programs")
    to.add_argument("--debug", action="store_true", help="tracebacks of errors")


def _absolute_path(text: str) -> str:
    """A path on the command line is relative to the current folder."""
    return text if "://" in text else str(Path(text).absolute())
