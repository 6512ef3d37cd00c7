"""Results of a subject: a line of JSON for each mutant, its summary, and the tests that no mutant needed."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.subjects import MeasuredTest

SURVIVORS = Path(__file__).with_name("survivors.tsv")
EQUIVALENT = "equivalent: "


class Row(NamedTuple):
    """One mutant and its outcome."""

    key: str
    digest: str
    """Of the module's source that it changes."""
    module: str
    line: int
    function: str
    change: str
    kind: str
    test: str
    passed: Sequence[str]
    seconds: float

    @property
    def name(self) -> tuple[str, str, str]:
        """Name of the mutant in `survivors.tsv`, which does not depend on line numbers."""
        return self.module, self.function, self.change

    def as_line(self) -> str:
        """Return the row as a line of JSON."""
        return f"{json.dumps(self._asdict())}\n"


def read_rows(file: Path) -> list[Row]:
    """Rows of an earlier run; a last line that was cut off is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write all rows of a file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text("".join(row.as_line() for row in rows))
    part.rename(file)


def read_verdicts(file: Path = SURVIVORS) -> dict[tuple[str, str, str], str]:
    """Verdicts on survivors: `equivalent: because ...`, or the test that kills the mutant."""
    verdicts = {}
    for line in file.read_text().splitlines():
        module, function, change, verdict = line.split("\t")
        verdicts[module, function, change] = verdict
    return verdicts


def summary(subject: str, seed: int, rows: Sequence[Row], verdicts: Mapping[tuple[str, str, str], str]) -> str:
    """Return counts of a subject, then its survivors not known as equivalent, by module."""
    equivalent = {name for name, verdict in verdicts.items() if verdict.startswith(EQUIVALENT)}
    valid_rows = [row for row in rows if row.kind != "invalid"]
    counts = Counter(
        "equivalent" if row.kind == "survived" and row.name in equivalent else row.kind for row in valid_rows
    )
    killed, survived = counts["killed"] + counts["timed out"], counts["survived"]
    seconds = sum(row.seconds for row in rows) / max(1, len(rows))
    heading = (
        f"{subject}, seed {seed}: {len(valid_rows)} mutants, "
        f"{_percent(killed, len(valid_rows) - counts['equivalent'])} killed "
        f"({_percent(killed, killed + survived)} of those that a test runs), "
        f"{counts['timed out']} of them by time; {survived} survived, "
        f"{counts['equivalent']} equivalent, {counts['not covered']} not covered; {seconds:.2f} s a mutant"
    )
    open_rows = [
        row
        for row in sorted(valid_rows, key=lambda row: (row.kind, row.module, row.line))
        if row.kind in ("survived", "not covered") and row.name not in equivalent
    ]
    lines = [f"{row.kind}\t{row.module}:{row.line}\t{row.function}\t{row.change}" for row in open_rows]
    return "\n".join([heading, *lines])


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "none"


def without_kills(rows: Sequence[Row], measured: Sequence[MeasuredTest]) -> str:
    """Return tests that ran a mutant and killed none, one a line: id, number of mutants, seconds."""
    killers = {row.test for row in rows}
    ran: dict[str, int] = defaultdict(int)
    for row in rows:
        for test in row.passed:
            ran[test] += 1
    lines = [
        f"{test.test}\t{ran[test.test]}\t{test.seconds:.3f}\n"
        for test in measured
        if ran[test.test] and test.test not in killers
    ]
    return "".join(lines)
