"""Commands of `larder` in two checkouts, each with its own copy of a folder and its own Redis."""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from tests.checkouts import Checkout
from tests.contract.side_by_side.decided import CHANGED_CODES
from tests.contract.side_by_side.differences import Difference, differences_of_values

LAUNCH: Final = Path(__file__).with_name("launch")
_WITHIN_S: Final = 600.0
CommandLine = Sequence[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: its code, and what it printed."""

    arguments: tuple[str, ...]
    code: int
    output: str
    errors: str

    @property
    def error_code(self) -> str:
        """Code of the error that the command ended with, such as `conflict`; "" without one."""
        lines = self.errors.strip().splitlines() or [""]
        match = re.match(r"[a-z0-9_]+(?=: )", lines[-1])
        return match[0] if match else ""

    @property
    def document(self) -> Any:
        """What it printed as JSON: one document, or one in each line; None where it printed none."""
        try:
            return orjson.loads(self.output)
        except orjson.JSONDecodeError:
            pass
        try:
            return [orjson.loads(line) for line in self.output.splitlines()] or None
        except orjson.JSONDecodeError:
            return None


def outcomes(
    checkout: Checkout, folder: Path, environ: dict[str, str], commands: Sequence[CommandLine]
) -> list[Outcome]:
    """Run these commands of a checkout in `folder` with this environment; return their outcomes."""
    variables = checkout.environment({**environ, "LARDER_CHECKOUT": str(checkout.root)})
    completed_process = subprocess.run(
        [checkout.python, LAUNCH / "many_commands.py"], cwd=folder, env=variables,
        input=json.dumps([list(arguments) for arguments in commands]), capture_output=True, text=True, check=False,
        timeout=_WITHIN_S,
    )  # fmt: skip
    assert completed_process.returncode == 0, completed_process.stderr[-4_000:]
    return [
        Outcome(tuple(row["words"]), row["code"], row["output"].replace(str(folder), "."), row["errors"])
        for row in json.loads(completed_process.stdout.splitlines()[-1])
    ]


def difference_of_outcomes(left: Outcome, right: Outcome) -> Difference | None:
    """The first difference of two outcomes of one command: its code, or names and types of what it printed as JSON."""
    codes = left.code, right.code
    if left.code != right.code and CHANGED_CODES.get(left.arguments[0]) != codes:
        sides = (f"{outcome.code}: {(outcome.errors or outcome.output)[-300:]}" for outcome in (left, right))
        return Difference("exit code", *sides)
    if left.error_code != right.error_code:
        return Difference("code of the error", left.errors[-300:], right.errors[-300:])
    if "--json" not in left.arguments:
        return None
    return next(differences_of_values(left.document, right.document, "--json", is_shape=True), None)
