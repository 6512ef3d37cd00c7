"""The tables of findings."""

from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent


class Finding(NamedTuple):
    """One line of a table."""

    text: str
    test: str

    @property
    def has_test(self) -> bool:
        """Whether a test keeps the finding from coming back."""
        return not self.test.startswith("none:")

    @property
    def module(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.partition("[")[0].rpartition("::")[2]


def findings(folder: Path = TABLES) -> list[Finding]:
    """Return all lines of the tables; raise ValueError for one without exactly two columns."""
    rows = []
    for table in sorted(folder.glob("*.tsv")):
        for number, line in enumerate(table.read_text().splitlines(), 1):
            columns = line.split("\t")
            if len(columns) != len(Finding._fields):
                raise ValueError(f"{table.name}, line {number}: {len(columns)} columns, not 2")
            rows.append(Finding(*columns))
    return rows
