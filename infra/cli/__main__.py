"""Command `larder`: finds the settings and the subcommand's module, and calls the module with the other arguments."""

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
from infra.cli.commands import ENTRY_BY_NAME, SETTINGS_FILE, help_page, missing_extras_line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, or 1 if it failed, 2 for a LarderError, 130 if interrupted.

    Wrong usage and missing extras return 2 as well.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of standard output, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print(printable_lines(f"larder: this machine refused: {error}"), file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev -m infra.cli ...
            raise
        text = printable_lines(f"internal error: {type(error).__name__}: {error}").rstrip(": ")
        print(f"larder: {text}; python -X dev -m infra.cli shows the traceback", file=sys.stderr)
        return EXIT_FAILED


def _run(argv: list[str]) -> int:
    argv, config_path = _split_config(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_page())
        return 0 if argv else EXIT_USAGE
    command_name, command_argv = argv[0], argv[1:]
    if command_name == "--version":
        print(f"larder {THIS_RELEASE}")
        return 0
    if (entry := ENTRY_BY_NAME.get(command_name)) is None:
        print(f"larder: {_unknown_word_text(command_name)}", file=sys.stderr)
        return EXIT_USAGE
    if missing_extra_text := missing_extras_line(entry):
        print(f"larder: {missing_extra_text}", file=sys.stderr)
        return EXIT_USAGE
    if config_path is None and not os.environ.get("LARDER_CONFIG") and Path(SETTINGS_FILE).is_file():
        config_path = SETTINGS_FILE
    if config_path is not None:
        os.environ["LARDER_CONFIG"] = config_path
    elif entry.reads_settings and not os.environ.get("LARDER_CONFIG"):
        print(
            f"larder: there is no {SETTINGS_FILE} in this folder (larder init writes one): the environment and the "
            "defaults are used",
            file=sys.stderr,
        )
    exit_code: int = import_module(entry.module_name).main(command_argv, prog=f"larder {command_name}")
    return exit_code


def _split_config(argv: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--config FILE`, which may be at any position, and the file or None."""
    parser = argparse.ArgumentParser(prog="larder", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE")
    args, remaining_argv = parser.parse_known_args(argv)
    return remaining_argv, args.config


def _unknown_word_text(unknown_word: str) -> str:
    kind = "option" if unknown_word.startswith("-") else "command"
    close_matches = difflib.get_close_matches(unknown_word, [*ENTRY_BY_NAME, "--help", "--version", "--config"], n=1)
    hint = f"did you mean {close_matches[0]}?" if close_matches else "larder --help lists all commands"
    return f"there is no {kind} {unknown_word!r}: {hint}"


if __name__ == "__main__":
    sys.exit(main())
