"""Each command by itself has all that it imports: tests within one process find what another command imported."""

import argparse
import subprocess
import sys

from precompute.cli.console import CommandPlace
from precompute.cli.parser import parser_of_commands
from tests.unit.test_rooms import ROOT

# One process that has imported what every command has, and forks for each; libraries that take long are loaded once.
PROGRAM = """
import ast, inspect, os, sys, textwrap, traceback
import faiss, numpy, onnx, onnxruntime, pyarrow.compute, pyarrow.dataset, pyarrow.parquet, scipy.sparse.linalg
import precompute.__main__
from precompute.cli.console import CommandPlace

for line in sys.stdin:
    name, *loads = line.split()
    if not os.fork():
        code = 1
        try:
            command = CommandPlace(name, tuple(loads)).load()
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


def places() -> list[CommandPlace]:
    """Places of all commands, each once."""
    (commands,) = (
        each
        for each in parser_of_commands()._actions
        if isinstance(each, argparse._SubParsersAction)
    )
    return sorted({each.get_default("run") for each in commands.choices.values()}, key=str)


def loaded(found: list[CommandPlace]) -> tuple[list[int], str]:
    """Exit status of the load of each, and what was said of those that failed."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(f"{each.name} {' '.join(each.loads)}\n" for each in found),
        cwd=ROOT, capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip
    return [int(line.split()[0]) for line in told.stdout.splitlines()], told.stderr


def test_each_command_loads_in_a_process_in_which_no_other_ran() -> None:
    found = places()
    lacking = [CommandPlace("cli.commands.nobody"), CommandPlace("cli.nowhere.night")]
    statuses, said = loaded([*found, *lacking])

    assert len(found) > 20 and statuses[: -len(lacking)] == [0] * len(found), said
    assert all(statuses[-len(lacking) :]) and "nobody" in said and "nowhere" in said
