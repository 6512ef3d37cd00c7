"""Try mutants of a subject: `python -m tests.mutants SUBJECT [--seed N] [--count N]`.

Mutants are drawn by the seed from all of the subject's modules. A mutant is tried on the tests that run its line, the
quickest first, those of `tests/unit` before all others. A run that was ended goes on where it was, with the same seed.
Results are below `build/mutants/SUBJECT`: `SEED.jsonl`, the summary `SEED.txt`, and `SEED.without-kills.tsv`.
"""

import argparse
import hashlib
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.mutants.coverage_by_test import measure
from tests.mutants.mutations import MutableModule, Mutant, drawn
from tests.mutants.results import Row, read_rows, read_verdicts, summary, without_kills, write_rows
from tests.mutants.subjects import ROOT, SUBJECTS, MeasuredTest, Subject
from tests.mutants.trial import Outcome, Trials

OUTPUT = ROOT / "build/mutants"
OPEN = ("survived", "not covered", "invalid")
UNIT_LIMIT_S = 8.0
"""Unit tests of one mutant take this long together, as they were measured; at least one is run."""
OTHER_LIMIT_S = 6.0
"""Other tests behind unit tests take this long together; there may be none."""
OTHER_LIMIT_ALONE_S = 40.0
"""The same where no unit test runs the line; at least one is run."""


def covering(mutant: Mutant, measured: Sequence[MeasuredTest]) -> list[MeasuredTest]:
    """Return the tests to try a mutant on, in order: those that run its line, else its statement."""
    for lines in (mutant.lines[:1], mutant.lines):
        candidates = [test for test in measured if test.runs(mutant.module, lines)]
        if candidates:
            break
    units = _varied([test for test in candidates if test.is_unit], UNIT_LIMIT_S, count_min=1)
    other_tests = [test for test in candidates if not test.is_unit]
    if units:
        return units + _varied(other_tests, OTHER_LIMIT_S, count_min=0)
    return _varied(other_tests, OTHER_LIMIT_ALONE_S, count_min=1)


def _varied(tests: Sequence[MeasuredTest], limit_s: float, *, count_min: int) -> list[MeasuredTest]:
    """Return tests within the limit, quickest first: one case of each function, then second cases, and so on."""
    cases: Counter[str] = Counter()
    ranked = []
    for test in tests:
        function = test.test.partition("[")[0]
        ranked.append((cases[function], test))
        cases[function] += 1
    selected_tests: list[MeasuredTest] = []
    seconds = 0.0
    for _, test in sorted(ranked, key=lambda pair: pair[0]):
        if len(selected_tests) < count_min or seconds + test.seconds <= limit_s:
            selected_tests.append(test)
            seconds += test.seconds
    return selected_tests


def digest_of(path: str) -> str:
    """Return the digest of a module's current source."""
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


def row_of(outcome: Outcome) -> Row:
    """Return the row of the results."""
    mutant = outcome.mutant
    return Row(
        key=mutant.key, digest=digest_of(mutant.module), module=mutant.module, line=mutant.lines[0],
        function=mutant.function, change=mutant.change, kind=outcome.kind, test=outcome.test,
        passed=outcome.passed, seconds=outcome.seconds,
    )  # fmt: skip


def try_subject(subject: Subject, file: Path, options: argparse.Namespace) -> None:
    """Try the mutants that have no row in the file yet."""
    modules = [MutableModule(path, (ROOT / path).read_text()) for path in subject.module_files()]
    digests = {module.path: digest_of(module.path) for module in modules}
    rows = [row for row in read_rows(file) if digests.get(row.module) == row.digest]
    if options.again:
        rows = [row for row in rows if row.kind not in OPEN]
    write_rows(file, rows)
    tried = {row.key for row in rows}
    seed, count = options.seed, options.count
    mutants = [mutant for mutant in drawn(modules, seed, count) if mutant.key not in tried]

    def measured_tests() -> list[MeasuredTest]:
        return measure(subject.module_files(), subject.test_files(), OUTPUT / "coverage", seed)

    apart(measured_tests)
    measured = measured_tests()
    trials = [(mutant, covering(mutant, measured)) for mutant in mutants]
    test_files = sorted({test.test.partition("::")[0] for _, tests in trials for test in tests})
    total = sum(len(module) for module in modules)
    print(f"{len(trials)} of {total} mutants to try on tests of {len(test_files)} files", flush=True)
    started = time.monotonic()

    def report(outcome: Outcome) -> None:
        rows.append(row_of(outcome))
        with file.open("a") as lines:
            lines.write(rows[-1].as_line())
        tried_count = len(rows) - len(tried)
        if tried_count % 20 == 0:
            print(f"{tried_count} of {len(trials)}, {time.monotonic() - started:.0f} s", flush=True)

    for mutant, tests in trials:
        if not tests:
            report(Outcome(mutant, "not covered"))
    covered = [trial for trial in trials if trial[1]]
    if covered:
        Trials(covered, options.workers).run(test_files, seed, report)
    if len(rows) - len(tried) < len(trials):
        raise SystemExit("not all mutants were tried")
    unused = file.with_suffix(".without-kills.tsv")
    unused.write_text(without_kills(rows, measured))


def apart(work: Callable[[], object]) -> None:
    """Do the work in a fork, so that its imports and threads end with it."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        if status:
            sys.exit(os.waitstatus_to_exitcode(status))
        return
    code = 1
    try:
        work()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Try each requested subject and print its summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("subject", choices=[*SUBJECTS, "all"])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--count", type=int, default=400, help="mutants of each subject")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at once")
    parser.add_argument("--again", action="store_true", help="try survivors of this seed once more")
    options = parser.parse_args()
    print(f"seed {options.seed} (SEED={options.seed} goes on with it)", flush=True)
    os.environ["LARDER_SEED"] = str(options.seed)
    for name in SUBJECTS if options.subject == "all" else [options.subject]:
        file = OUTPUT / name / f"{options.seed}.jsonl"
        apart(lambda name=name, file=file: try_subject(SUBJECTS[name], file, options))  # type: ignore[misc]
        text = summary(name, options.seed, read_rows(file), read_verdicts())
        file.with_suffix(".txt").write_text(f"{text}\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
