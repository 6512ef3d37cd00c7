"""Parser of the command line: subcommands, their options, and the function that runs each."""

import argparse
from functools import partial

from cache.config.timetable import NIGHT_STEPS
from precompute.cli.temporary_redis import load_again, verify_again
from precompute.config.commands import CommandRow, absolute_path, add_cut_options
from precompute.config.console import CommandPlace
from precompute.erasure.options import ERASE
from precompute.evaluation.options import FRESHNESS
from precompute.events.options import TAKE_EVENTS
from precompute.planning.command_row import PLAN
from precompute.reference.options import TRAIN
from precompute.traffic.canary.options import CANARY
from precompute.traffic.options import EXPERIMENT
from precompute.usage.options import WORKLIST

PROG = "python -m precompute"
STEPS_WITHIN_SCORE = ("embed_items", "assemble")
"""Steps without their own command: `score` runs them before and after scoring."""


def _add_night_cut_options(command: argparse.ArgumentParser) -> None:
    add_cut_options(
        command,
        "data_until of the settings, else all data is used and the newest change of an input file names the "
        "generation, so that a repeat continues the same build",
    )


def _night_options(command: argparse.ArgumentParser) -> None:
    _add_night_cut_options(command)
    command.add_argument(
        "--until",
        choices=NIGHT_STEPS,
        default=NIGHT_STEPS[-1],
        metavar="STEP",
        help="last step to run, such as verify for a generation that a canary will try (default: retire)",
    )


def _begin_options(command: argparse.ArgumentParser) -> None:
    _add_night_cut_options(command)
    command.add_argument(
        "--events-until", metavar="POSITION",
        help="last event to read, as `take-events` prints it (default: all events taken over)",
    )  # fmt: skip


def _hand_over_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", help="folder with bundle.json; relative to the configuration")


def _score_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--shard", type=int)


def _override_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rule", required=True, help="name of the rule, as in the refusal")
    command.add_argument("--reason", required=True, help="recorded in the release record and the manifest")


def _attempt_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--attempt")


def _roll_back_options(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "A roll back changes the live generation, not the model of the next night: that is the folder's, or the one "
        "handed over last. If the model is the reason, import or hand over the earlier one first; the output "
        "describes how."
    )
    command.add_argument("--to", metavar="GENERATION", help="default: the previous generation")
    command.add_argument("--reason", required=True, help="recorded in the release record")
    command.add_argument("--attempt")


def _restore_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--adopt",
        action="store_true",
        help="also follow the artefact store if Redis holds a pointer that no release record explains",
    )
    command.add_argument("--reason", help="for --adopt; recorded in the release record")
    command.add_argument(
        "--empty",
        action="store_true",
        help="for --adopt: also follow a store without any release record, which forgets every release and erasure",
    )


def _pin_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--reason", required=True)
    command.add_argument("--days", type=float, help="duration of the pin (default: until unpinned)")


def _block_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--item", action="append", default=[], metavar="ID")
    command.add_argument("--entity", action="append", default=[], metavar="ID")
    command.add_argument("--reason", default="", help="recorded in the audit log")
    command.add_argument("--list", action="store_true", help="only list blocked ids")


def _audit_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--since", metavar="TIME", help="ISO 8601, in UTC unless it has an offset")
    command.add_argument("--entity", metavar="ID", help="only records about this entity")


def _step_place(step_name: str, *loads: str, command: str = "step") -> CommandPlace:
    return CommandPlace(f"cli.commands.{command}", (f"steps.{step_name}", *loads))


_generation_command_row = partial(CommandRow, takes_generation=True)

COMMANDS: tuple[CommandRow, ...] = (
    CommandRow(
        "night",
        CommandPlace("cli.commands.night", tuple(f"steps.{step}" for step in NIGHT_STEPS)),
        f"run the whole night: {', '.join(NIGHT_STEPS).replace('_', ' ')}",
        _night_options,
        store_access="makes",
    ),
    TRAIN,
    CommandRow(
        "begin",
        CommandPlace("cli.commands.begin", ("steps.begin",)),
        "name the generation, pin its inputs, partition the sources",
        _begin_options,
        store_access="makes",
    ),
    TAKE_EVENTS,
    CommandRow(
        "hand-over",
        CommandPlace("cli.commands.hand_over_bundle", ("bundles.bundle_store",)),
        "put a bundle into the store for the nights of all hosts",
        _hand_over_options,
        needed_redis="none",
        store_access="makes",
    ),
    _generation_command_row(
        "score",
        _step_place("score", "steps.embed_items", "steps.assemble", command="score"),
        "score all shards, or one",
        _score_options,
        needed_redis="none",
        argument_defaults={"step": "score"},
    ),
    _generation_command_row(
        "index",
        _step_place("index"),
        "build the FAISS indexes",
        needed_redis="none",
        argument_defaults={"step": "index"},
    ),
    _generation_command_row(
        "quantize",
        _step_place("quantize", command="quantize"),
        "make and compare the int8 models",
        needed_redis="none",
        argument_defaults={"step": "quantize"},
    ),
    _generation_command_row(
        "load", _step_place("load"), "stream the pages into Redis", argument_defaults={"step": "load"}
    ),
    _generation_command_row(
        "verify",
        _step_place("verify", "steps.load"),
        "run the gates",
        prepare=load_again,
        argument_defaults={"step": "verify"},
    ),
    CommandRow(
        "override",
        CommandPlace("cli.override.command"),
        "let a refused generation pass one rule, with a reason",
        _override_options,
        takes_generation=True,
    ),
    _generation_command_row(
        "publish",
        _step_place("publish", "steps.load", "steps.verify"),
        "make a verified generation live",
        _attempt_option,
        prepare=verify_again,
        argument_defaults={"step": "publish"},
    ),
    _generation_command_row(
        "warm",
        _step_place("warm", command="warm"),
        "wait until every replica answers from this generation",
        argument_defaults={"step": "warm"},
    ),
    CANARY,
    EXPERIMENT,
    CommandRow(
        "roll-back",
        CommandPlace("cli.commands.roll_back", ("steps.load",)),
        "make an earlier generation live again",
        _roll_back_options,
        prepare=load_again,
    ),
    CommandRow(
        "retire",
        CommandPlace("cli.commands.step", ("steps.retire",)),
        "remove generations that are no longer needed",
        argument_defaults={"step": "retire"},
    ),
    CommandRow(
        "restore",
        CommandPlace("cli.commands.restore"),
        "rebuild a lost Redis from the artefact store",
        _restore_options,
        needed_redis="running",
    ),
    CommandRow(
        "pin",
        CommandPlace("cli.commands.pin"),
        "keep a generation from being retired",
        _pin_options,
        takes_generation=True,
        argument_defaults={"unpin": False},
    ),
    CommandRow(
        "unpin",
        CommandPlace("cli.commands.pin"),
        "lift a pin",
        takes_generation=True,
        argument_defaults={"unpin": True},
    ),
    *(
        CommandRow(
            name,
            CommandPlace("cli.commands.block"),
            f"{text}; effective within seconds",
            _block_options,
            needed_redis="if running",
            argument_defaults={"unblock": name == "unblock"},
        )
        for name, text in (("block", "never serve these"), ("unblock", "serve these again"))
    ),
    ERASE,
    CommandRow(
        "status",
        CommandPlace("cli.commands.status"),
        "generations with state, size, gates and pins; replicas; the next generation due; exit code 3 if there is a "
        "problem; also works without Redis",
        needed_redis="if running",
        store_access="reads",
    ),
    WORKLIST,
    CommandRow(
        "audit",
        CommandPlace("cli.commands.audit"),
        "who published, rolled back, overrode, blocked, erased or changed tokens, and with what result",
        _audit_options,
        needed_redis="none",
        store_access="reads",
    ),
    PLAN,
    FRESHNESS,
)
"""Rows of the commands in the order of the help, those of features included; commands of all other steps follow."""


def build_command_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Build the parser; each command sets `run`, the Redis that it needs, and how a new one is prepared.

    No command is imported yet.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Precompute predictions for every known entity and publish them as one generation.",
        epilog=(
            "Settings: a TOML file (--config or LARDER_CONFIG), then LARDER_ARTIFACTS, LARDER_NAMESPACE, LARDER_STATE "
            "and REDIS_URL. Without REDIS_URL the command starts a Redis server for itself, or joins that of a "
            "running `make serve`. Single steps keep their state in Redis: with REDIS_URL they need not load their "
            "generation again each time."
        ),
    )
    _add_shared_options(parser)
    # Shared options may also follow the command; without defaults there, which would reset options given before it.
    shared_parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared_options(shared_parser.add_argument_group("options of all commands"))
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command_names = {row.name for row in COMMANDS}
    other_steps = [
        step_name for step_name in NIGHT_STEPS if step_name not in command_names and step_name not in STEPS_WITHIN_SCORE
    ]
    other_rows = [
        _generation_command_row(
            step_name, _step_place(step_name), f"run the step {step_name}", argument_defaults={"step": step_name}
        )
        for step_name in other_steps
    ]
    for row in (*COMMANDS, *other_rows):
        command = subparsers.add_parser(
            row.name, help=row.help_text, description=row.help_text, parents=[shared_parser]
        )
        if row.takes_generation:
            command.add_argument("generation", help="generation id, as `begin` and `status` print it")
        row.add_options(command)
        command.set_defaults(
            run=row.place,
            redis=row.needed_redis,
            prepare=row.prepare,
            store=row.store_access,
            **dict(row.argument_defaults),
        )
    return parser


def _add_shared_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with the night's settings")
    parser.add_argument("--namespace", help="separates several Larders in one Redis")
    parser.add_argument(
        "--artifacts", metavar="URL", type=absolute_path, help="artefact store: a folder or an fsspec URL"
    )
    parser.add_argument(
        "--state", metavar="DIR", type=absolute_path, help="folder for files of this host (default .larder)"
    )
    parser.add_argument("--bundle", metavar="DIR", type=absolute_path, help="the model bundle")
    parser.add_argument("--shards", type=int, help="number of hash ranges to score separately")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--debug", action="store_true", help="tracebacks of errors")
