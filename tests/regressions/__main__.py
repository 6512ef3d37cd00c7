"""Show for each finding its test, the commit that added the test, and how the test fails without the fix.

`python -m tests.regressions COMMIT` makes a worktree of COMMIT with an environment of its own and runs there the tests
that the tables beside this module name, as they were before the names of the code were changed: today's would find no
module there. A test that came after that runs at the parent of the commit that brought it. The table goes to standard
output, progress to standard error. Exit code 1: a test is not red there, or a table names a test that there is not.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.regressions.findings import TABLES, Finding, findings
from tests.regressions.outcomes import SHOWN_BY_PRODUCT, Outcome

ROOT = Path(__file__).parents[2]
CASE_TIMEOUT_S = 120.0
# A pytest process without output for this long hangs where no alarm can end it.
SILENCE_S = 300.0

OLD_NAMES_COMMIT = "c297e29d"
"""The last commit whose tests use the names of older code."""

EARLIER_ANCESTOR = {"^": "~4", "~4": "~12", "~12": "~30"}
"""Where a test that passes at an ancestor of its commit is tried next: the mend was committed before it."""

# Kinds of failure, the strongest proof first: a wrong answer of the product, then a missing name of today.
RED = {
    "assertion": "by assertion",
    "exception": "by an exception of the product",
    "timeout": "by a timeout",
    "interface": "by a name, argument, field or setting that is not there",
    "import": "by import",
}
NOT_RED = {
    "passed": "passes",
    "skipped": "is skipped",
    "collection": "cannot be collected",
    "absent": "has no such case there",
    "gone": "is named in a table and not there today",
}


class Row(NamedTuple):
    """A line of the printed table; `red_commit` is the commit at which the test was run."""

    finding: str
    test: str
    commit: str
    red_commit: str
    kind: str
    text: str

    @property
    def is_red(self) -> bool:
        """Whether the test fails at the older commit."""
        return self.kind in RED


class FindingRun(NamedTuple):
    """Where a finding's test is run: the commits of code and tests, and the test's id there."""

    code_commit: str
    tests_commit: str
    test: str


@cache
def commit_of(finding: Finding) -> str:
    """Return the commit that added the test, abbreviated."""
    # Search all tests, because a function that only moved to another file was committed earlier.
    return first_commit_with(f"def {finding.function}(", "tests") or "not committed"


def first_commit_with(text: str, folder: str) -> str:
    """Return the first commit that changed the count of a text in a folder, abbreviated; "" without one."""
    return run_git("log", "--format=%h", "--reverse", f"-S{text}", "--", folder).partition("\n")[0]


@cache
def tests_commit_of(finding: Finding) -> str:
    """Return the commit whose tests show a finding: its test's, its case's, or its row's if that came later."""
    commit = commit_of(finding)
    if commit != "not committed" and not is_ancestor(commit, OLD_NAMES_COMMIT):
        module, _, test_id = finding.test.partition("::")
        case_name = test_id.partition("[")[2].removesuffix("]")
        case_commit = first_commit_with(f'"{case_name}"', module) if case_name else ""
        return case_commit if case_commit and is_ancestor(commit, case_commit) else commit
    return first_commit_with(f"{finding.text}\t", str(TABLES.relative_to(ROOT)))


def is_ancestor(commit: str, other_commit: str) -> bool:
    """Whether a commit is part of the history of another."""
    command = ["git", "merge-base", "--is-ancestor", commit, other_commit]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def run_git(*arguments: str) -> str:
    """Return git's output in this repository."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def find_runs(selected_findings: list[Finding], commit: str) -> dict[Finding, FindingRun]:
    """Return where each test is run."""
    tests_by_text: defaultdict[str, list[str]] = defaultdict(list)
    test_by_function: dict[str, str] = {}
    for finding in findings_at(OLD_NAMES_COMMIT):
        tests_by_text[finding.text].append(finding.test)
        test_by_function[finding.function] = finding.test
    run_by_finding = {}
    for finding in selected_findings:
        if not finding.has_test:
            continue
        if (test := test_by_function.get(finding.function)) is None:
            tests = tests_by_text[finding.text]
            test = tests[0] if len(tests) == 1 else None
        if test is not None:
            run_by_finding[finding] = FindingRun(commit, OLD_NAMES_COMMIT, test)
        elif mended := tests_commit_of(finding):
            run_by_finding[finding] = FindingRun(f"{mended}^", mended, test_at(mended, finding))
    return run_by_finding


def test_at(commit: str, finding: Finding) -> str:
    """The test's id at the commit that brought it, where its file may have had another path."""
    found = run_git("grep", "-l", f"def {finding.function}(", commit, "--", "tests")
    module = found.partition("\n")[0].partition(":")[2]
    return f"{module}::{finding.test.partition('::')[2]}"


def findings_at(commit: str) -> list[Finding]:
    """Return the lines of the tables at an older commit."""
    folder = TABLES.relative_to(ROOT)
    names = run_git("ls-tree", "--name-only", commit, f"{folder}/").splitlines()
    texts = [run_git("show", f"{commit}:{name}") for name in names if name.endswith(".tsv")]
    return [Finding(*line.split("\t")) for text in texts for line in text.splitlines()]


def note(text: str) -> None:
    """Report progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def worktree(commit: str, tests_commit: str, folder: Path | None, environment: str) -> Iterator[Path]:
    """Make a worktree of `commit` with another commit's tests and an environment; a named folder is kept."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        tree = folder or Path(temporary_folder) / "tree"
        run_git("worktree", "prune")
        try:
            if not tree.exists():
                note(f"a worktree of {commit}")
                run_git("worktree", "add", "--quiet", "--detach", "--force", str(tree), commit)
            demand_commit(tree, commit)
            shutil.rmtree(tree / "tests", ignore_errors=True)
            with tempfile.TemporaryFile() as archive:
                command = ["git", "archive", tests_commit, "tests"]
                subprocess.run(command, cwd=ROOT, stdout=archive, check=True)
                archive.seek(0)
                subprocess.run(["tar", "x"], cwd=tree, stdin=archive, check=True)
            shutil.copy(Path(__file__).with_name("outcomes.py"), tree / "tests" / "regressions")
            subprocess.run(["make", environment], cwd=tree, check=True, stdout=sys.stderr)
            yield tree
        finally:
            if folder is None:
                with contextlib.suppress(subprocess.CalledProcessError):
                    run_git("worktree", "remove", "--force", str(tree))


def demand_commit(tree: Path, commit: str) -> None:
    """Raise SystemExit if a reused folder holds another commit."""
    head, wanted = (run_git("-C", str(tree), "rev-parse", "HEAD"), run_git("rev-parse", f"{commit}^{{commit}}"))
    if head != wanted:
        raise SystemExit(f"{tree} holds {head.strip()}, not {commit}: name another folder")


def written(file: Path) -> tuple[list[Outcome], str | None]:
    """Return the outcomes written by a run, and the test that was begun last unless it has ended."""
    outcomes: list[Outcome] = []
    started_test = None
    for line in file.read_text().splitlines() if file.exists() else ():
        values = json.loads(line)
        if "started" in values:
            started_test = values["started"]
        else:
            outcomes.append(Outcome(**values))
            started_test = None
    return outcomes, started_test


def run_once(tree: Path, module: str, tests: list[str], timeout_s: float) -> list[Outcome]:
    """Return the outcomes of one pytest process; a silent one is ended with all that it started."""
    chosen_file, file, log = (tree.parent / f"{tree.name}.{name}" for name in ("chosen", "outcomes", "log"))
    chosen_file.write_text("\n".join(tests))
    file.unlink(missing_ok=True)
    command = [
        ".venv/bin/python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
        "-p", "tests.regressions.outcomes", "--chosen", str(chosen_file), "--outcomes", str(file),
        "--case-timeout", str(timeout_s), module,
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{tree}/.venv/bin:{os.environ['PATH']}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            heard_at, size = time.monotonic(), 0
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                new_size = file.stat().st_size if file.exists() else 0
                if new_size != size:
                    heard_at, size = time.monotonic(), new_size
                if time.monotonic() - heard_at > max(SILENCE_S, 2 * timeout_s):
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcomes, started_test = written(file)
    if started_test is not None:
        outcomes.append(Outcome(started_test, "timeout", "the process fell silent or ended within it"))
    if not outcomes:
        # A conftest.py could not be imported at that commit: no test ran, so nothing is shown.
        lines = log.read_text(errors="replace").splitlines()
        reason = [line for line in lines if line.startswith("E ")] or lines[-1:]
        outcomes = [Outcome(test, "collection", reason[0].removeprefix("E").strip()) for test in tests]
    return outcomes


def outcomes_of(tree: Path, module: str, tests: list[str], timeout_s: float) -> dict[str, Outcome]:
    """Return how each test of one module ends there; for several cases, the strongest failure."""
    order = [*RED, *NOT_RED]
    outcome_by_test: dict[str, Outcome] = {}
    remaining_tests = tests
    while remaining_tests:
        outcomes = run_once(tree, module, remaining_tests, timeout_s)
        for outcome in outcomes:
            earlier_outcome = outcome_by_test.get(outcome.test)
            if earlier_outcome is None or order.index(outcome.kind) < order.index(earlier_outcome.kind):
                outcome_by_test[outcome.test] = outcome
        if not any(outcome.text.startswith("the process") for outcome in outcomes):
            break
        remaining_tests = [test for test in remaining_tests if test not in outcome_by_test]
    return {test: outcome_by_test.get(test, Outcome(test, "absent", "")) for test in tests}


def gone_tests(modules: dict[str, list[str]]) -> list[str]:
    """Return tests of the tables that do not exist today, except in modules that are skipped here."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        chosen_file, file = Path(temporary_folder) / "chosen", Path(temporary_folder) / "outcomes"
        chosen_file.write_text("\n".join(test for tests in modules.values() for test in tests))
        command = [
            sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider",
            "-p", "tests.regressions.outcomes", "--chosen", str(chosen_file), "--outcomes", str(file), *modules,
        ]  # fmt: skip
        collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        skipped = {outcome.test for outcome in written(file)[0] if outcome.kind == "skipped"}
    lines = set(collected.stdout.splitlines())
    named = skipped | lines | {line.partition("[")[0] for line in lines}
    return [test for tests in modules.values() for test in tests if test not in named]


def table(rows: list[Row]) -> Iterator[str]:
    """Return the lines of the table in Markdown."""
    yield "| finding | test | commit | red | at | how | seen there |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        if row.kind == "none":
            yield f"| {row.finding} | none | | | | | {row.text} |"
            continue
        red = "yes" if row.is_red else "NO"
        text = " ".join(row.text.split()).replace("|", "\\|")[:120]
        yield (f"| {row.finding} | `{row.test}` | {row.commit} | {red} | {row.red_commit} | {row.kind} | {text} |")


def summary(rows: list[Row]) -> Iterator[str]:
    """Lines that count the rows by how they ended."""
    counts = Counter(row.kind for row in rows)
    yield f"{len(rows)} rows of {len({row.finding.partition(':')[0] for row in rows})} findings"
    for kind, description in RED.items():
        yield f"{counts[kind]} red {description}"
    yield f"{counts['none']} without a test, with the reason"
    not_red = [row for row in rows if row.kind in NOT_RED]
    yield f"{len(not_red)} not red"
    for row in not_red:
        yield f"  {NOT_RED[row.kind]}: {row.finding}: {row.test}"


def rows_of(
    selected_findings: list[Finding], run_by_finding: dict[Finding, FindingRun], outcomes: dict[FindingRun, Outcome]
) -> list[Row]:
    """Return a row for each finding whose test has ended, or that has none."""
    rows = []
    for finding in selected_findings:
        finding_run = run_by_finding.get(finding)
        if not finding.has_test:
            reason = finding.test.removeprefix("none:").strip()
            rows.append(Row(finding.text, "", "", "", "none", reason))
        elif finding_run is None:
            rows.append(Row(finding.text, finding.test, commit_of(finding), "", "gone", ""))
        elif finding_run in outcomes:
            _, kind, text = outcomes[finding_run]
            rows.append(Row(finding.text, finding.test, commit_of(finding), finding_run.code_commit, kind, text))
    return rows


def write_rows(file: Path, rows: list[Row]) -> None:
    """Write the rows so far as JSON."""
    file.write_text(json.dumps([row._asdict() for row in rows], indent=1))


def red_before(file: Path) -> dict[str, Outcome]:
    """Return what an earlier run's rows show as failed by the product's behaviour, by today's tests."""
    rows = [Row(**row) for row in json.loads(file.read_text())]
    return {row.test: Outcome(row.test, row.kind, row.text) for row in rows if row.kind in SHOWN_BY_PRODUCT}


def main() -> int:
    """Print the table; 1 if a test is not red at the older commit."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.regressions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--only", default="", help="findings or tests that contain this text")
    parser.add_argument("--tree", type=Path, help="a folder for the worktree, kept for the next run")
    parser.add_argument("--environment", default="env", help="the target of make for it: torch-env runs tests of torch")
    parser.add_argument("--output", type=Path, help="a file for the table and the summary as well")
    parser.add_argument("--json", type=Path, help="a file for the rows as JSON")
    parser.add_argument(
        "--again", action="store_true", help="take what failed by what the product did from --json, and run the others"
    )
    parser.add_argument("--case-timeout", type=float, default=CASE_TIMEOUT_S, help="seconds, a test")
    options = parser.parse_args()
    if options.again and not options.json:
        parser.error("--again needs --json FILE, the rows of an earlier run")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    selected_findings = [
        finding for finding in findings() if options.only in finding.text or options.only in finding.test
    ]
    run_by_finding = find_runs(selected_findings, options.commit)
    todays_modules: defaultdict[str, list[str]] = defaultdict(list)
    for finding in run_by_finding:
        todays_modules[finding.module].append(finding.test)
    missing_tests = gone_tests(todays_modules)
    known_outcomes = red_before(options.json) if options.again else {}
    outcomes: dict[FindingRun, Outcome] = {}
    pending: defaultdict[tuple[str, str], defaultdict[str, list[FindingRun]]] = defaultdict(lambda: defaultdict(list))
    for finding, finding_run in run_by_finding.items():
        if finding.test in missing_tests:
            outcomes[finding_run] = Outcome(finding_run.test, "gone", "")
        elif finding.test in known_outcomes:
            outcomes[finding_run] = known_outcomes[finding.test]
        elif finding_run not in (runs_of_module := pending[finding_run[:2]][finding_run.test.partition("::")[0]]):
            runs_of_module.append(finding_run)
    while pending:
        (code_commit, tests_commit), modules = pending.popitem()
        tree = options.tree.resolve() if options.tree and code_commit == options.commit else None
        with worktree(code_commit, tests_commit, tree, options.environment) as folder:
            for number, (module, module_runs) in enumerate(modules.items(), 1):
                begun_at = time.monotonic()
                tests = [finding_run.test for finding_run in module_runs]
                of_module = outcomes_of(folder, module, tests, options.case_timeout)
                outcomes |= {finding_run: of_module[finding_run.test] for finding_run in module_runs}
                kinds = Counter(outcome.kind for outcome in of_module.values())
                counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                elapsed_s = time.monotonic() - begun_at
                note(f"{code_commit} {number}/{len(modules)} {module}: {counts} ({elapsed_s:.0f} s)")
                if options.json:
                    write_rows(options.json, rows_of(selected_findings, run_by_finding, outcomes))
        for finding, finding_run in run_by_finding.items():
            ancestor = finding_run.code_commit.removeprefix(finding_run.tests_commit)
            if finding_run[:2] != (code_commit, tests_commit) or outcomes[finding_run].kind != "passed":
                continue
            if (earlier := EARLIER_ANCESTOR.get(ancestor)) is not None:
                earlier_run = finding_run._replace(code_commit=f"{tests_commit}{earlier}")
                run_by_finding[finding] = earlier_run
                pending[earlier_run[:2]][finding_run.test.partition("::")[0]].append(earlier_run)
    rows = rows_of(selected_findings, run_by_finding, outcomes)
    lines = [*table(rows), "", *summary(rows)]
    print(*lines, sep="\n")
    if options.output:
        options.output.write_text("".join(f"{line}\n" for line in lines))
    return 0 if all(row.is_red or row.kind == "none" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
