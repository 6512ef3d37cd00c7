"""Command `larder`: finds the settings and the module of a command, and passes it the remaining arguments."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from cache.errors import LarderError
from cache.formats import THIS_RELEASE
from cache.process.command_line import printable_lines
from infra.cli.commands import BY_NAME, SETTINGS_FILE, help_page, lacking

FAILED = 1
USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 1 failed, 2 wrong usage or a missing extra, 130 interrupted."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # whoever read this, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(printable_lines(f"larder: this machine refused: {error}"), file=sys.stderr)
        return FAILED
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev -m infra.cli ...
            raise
        text = printable_lines(f"internal error: {type(error).__name__}: {error}").rstrip(": ")
        print(f"larder: {text}; python -X dev -m infra.cli shows the traceback", file=sys.stderr)
        return FAILED


def _run(argv: list[str]) -> int:
    argv, config = _without_config(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_page())
        return 0 if argv else USAGE
    name, command_argv = argv[0], argv[1:]
    if name == "--version":
        print(f"larder {THIS_RELEASE}")
        return 0
    if (entry := BY_NAME.get(name)) is None:
        print(f"larder: {_unknown(name)}", file=sys.stderr)
        return USAGE
    if line := lacking(entry):
        print(f"larder: {line}", file=sys.stderr)
        return USAGE
    if config is None and not os.environ.get("LARDER_CONFIG") and Path(SETTINGS_FILE).is_file():
        config = SETTINGS_FILE
    if config is not None:
        os.environ["LARDER_CONFIG"] = config
    elif entry.reads_settings and not os.environ.get("LARDER_CONFIG"):
        print(
            f"larder: there is no {SETTINGS_FILE} in this folder (larder init writes one): settings are the defaults "
            "and those of the environment",
            file=sys.stderr,
        )
    exit_code: int = import_module(entry.module).main(command_argv, prog=f"larder {name}")
    return exit_code


def _without_config(argv: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--config FILE`, at any position, and the file; None without one."""
    parser = argparse.ArgumentParser(prog="larder", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE")
    args, remaining_argv = parser.parse_known_args(argv)
    return remaining_argv, args.config


def _unknown(name: str) -> str:
    kind = "option" if name.startswith("-") else "command"
    near = difflib.get_close_matches(name, [*BY_NAME, "--help", "--version", "--config"], n=1)
    hint = f"did you mean {near[0]}?" if near else "larder --help lists all"
    return f"there is no {kind} {name!r}: {hint}"


if __name__ == "__main__":
    sys.exit(main())
