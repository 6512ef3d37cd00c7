"""Each command by itself has all that it imports: tests within one process find what another command imported."""

import argparse
import subprocess
import sys

from precompute.cli.parser import build_command_parser
from precompute.config.console import CommandPlace
from tests.unit.test_layering import ROOT

# One process imports what every command needs, and forks for each command, so that slow libraries are loaded once.
PROGRAM = """
import ast, inspect, os, sys, textwrap, traceback
import faiss, numpy, onnx, onnxruntime, pyarrow.compute, pyarrow.dataset, pyarrow.parquet, scipy.sparse.linalg
import precompute.__main__
from precompute.config.console import CommandPlace

for line in sys.stdin:
    name, *loads = line.split()
    if not os.fork():
        code = 1
        try:
            command = CommandPlace(name, tuple(loads)).import_command()
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(command)))):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    exec(ast.unparse(node), {})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.wait()
    print(status, name, flush=True)
"""


def list_command_places() -> list[CommandPlace]:
    """Places of all commands, each once."""
    (commands,) = (
        action for action in build_command_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return sorted({command_parser.get_default("run") for command_parser in commands.choices.values()}, key=str)


def loaded(command_places: list[CommandPlace]) -> tuple[list[int], str]:
    """Exit status of the load of each, and what was said of those that failed."""
    completed_process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join((f"{command_place.function_path} "
            f"{' '.join(command_place.imported_modules)}\n") for command_place in command_places),
        cwd=ROOT, capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip
    return [int(line.split()[0]) for line in completed_process.stdout.splitlines()], completed_process.stderr


def test_every_command_loads_in_a_process_in_which_no_other_ran() -> None:
    command_places = list_command_places()
    lacking = [CommandPlace("cli.commands.nobody"), CommandPlace("cli.nowhere.night")]
    statuses, error_output = loaded([*command_places, *lacking])

    assert len(command_places) > 20 and statuses[: -len(lacking)] == [0] * len(command_places), error_output
    assert all(statuses[-len(lacking) :]) and "nobody" in error_output and "nowhere" in error_output
