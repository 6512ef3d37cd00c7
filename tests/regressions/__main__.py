"""Show for each finding its test, the commit that brought the test, and whether it fails at an older commit.

`python -m tests.regressions COMMIT [--only TEXT]` makes a worktree of COMMIT with an environment of its own, puts the
tests of today into it, and runs those that stand in the tables beside this module.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent
MODULE_TIMEOUT_S = 900


class Finding(NamedTuple):
    """One line of a table."""

    text: str
    test: str

    @property
    def has_test(self) -> bool:
        """Whether a test keeps it mended."""
        return not self.test.startswith("none:")

    @property
    def module(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.rpartition("::")[2].partition("[")[0]


def findings(folder: Path = TABLES) -> list[Finding]:
    """All lines of the tables; raises ValueError for one without exactly two columns."""
    rows = []
    for table in sorted(folder.glob("*.tsv")):
        for number, line in enumerate(table.read_text().splitlines(), 1):
            columns = line.split("\t")
            if len(columns) != len(Finding._fields):
                raise ValueError(f"{table.name}, line {number}: {len(columns)} columns, not 2")
            rows.append(Finding(*columns))
    return rows


def commit_of(finding: Finding) -> str:
    """The commit that brought the test, abbreviated."""
    command = [
        "git", "log", "--format=%h", "--reverse", f"-Sdef {finding.function}(", "--", finding.module,
    ]  # fmt: skip
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.partition("\n")[0] or "not committed"


def prepare(folder: Path, commit: str) -> Path:
    """A worktree of `commit` with today's tests and an environment; returns its Python."""
    subprocess.run(
        ["git", "worktree", "add", "--detach", "--force", folder, commit], cwd=ROOT, check=True
    )
    shutil.rmtree(folder / "tests")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
    subprocess.run(["make", "env"], cwd=folder, check=True)
    return folder / ".venv/bin/python"


def failed(python: Path, folder: Path, module: str, tests: list[str]) -> dict[str, bool]:
    """Whether each of these tests of one module fails there; one that cannot be imported does."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        str(python), "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}", *tests,
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, timeout=MODULE_TIMEOUT_S, check=False)
    cases = ET.parse(report).iter("testcase") if report.exists() else ()  # noqa: S314  # our own report
    outcomes = {
        case.attrib["name"]: case.find("failure") is not None or case.find("error") is not None
        for case in cases
    }
    return {test: _has_failed(test.rpartition("::")[2], outcomes) for test in tests}


def _has_failed(name: str, outcomes: dict[str, bool]) -> bool:
    """Whether a case of the test failed, or none ran."""
    cases = [
        has_failed
        for case, has_failed in outcomes.items()
        if case == name or ("[" not in name and case.startswith(f"{name}["))
    ]
    return any(cases) or not cases


def main() -> int:
    """Print the table; 1 if a test passes at the older commit."""
    parser = argparse.ArgumentParser(prog="python -m tests.regressions", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--only", default="", help="findings that contain this text")
    options = parser.parse_args()
    chosen = [finding for finding in findings() if options.only in finding.text]
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for finding in chosen:
        if finding.has_test and finding.test not in modules[finding.module]:
            modules[finding.module].append(finding.test)
    is_red: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tree"
        try:
            python = prepare(folder, options.commit)
            for module, tests in modules.items():
                is_red |= failed(python, folder, module, tests)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=False)
    print(f"| finding | test | commit | red at {options.commit[:8]} |\n|---|---|---|---|")
    for finding in chosen:
        if finding.has_test:
            red = "yes" if is_red[finding.test] else "NO"
            print(f"| {finding.text} | `{finding.test}` | {commit_of(finding)} | {red} |")
        else:
            print(f"| {finding.text} | {finding.test} | | |")
    return 0 if all(is_red.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
