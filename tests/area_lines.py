"""Limits of source lines by area, from the rows of `area_lines.tsv`: `python -m tests.area_lines`.

The core of each package is an area, and so is each feature, whichever packages have a part of it. A row is raised in
the commit that needs it, with a sentence why.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from tests.unit.test_layering import FEATURES, NIGHT_FEATURES

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = Path(__file__).with_suffix(".tsv")
TOPS: Final = ("cache", "serving", "precompute", "dags", "infra")
SUFFIXES: Final = (".py", ".c", ".h", ".js", ".css", ".html")
FEATURE_NAMES: Final = frozenset(name for names in (*FEATURES.values(), *NIGHT_FEATURES.values()) for name in names)


class Row(NamedTuple):
    """Most lines that an area may have, and why it was last raised."""

    limit: int
    reason: str


def area_of(path: PurePosixPath) -> str:
    """Return the area of a source file: a feature, else the core of its package; `dags` and `infra` have no core."""
    top, *below = path.parts
    name = PurePosixPath(below[0]).stem
    if top in ("cache", "serving", "precompute"):
        return name if name in FEATURE_NAMES else f"core of {top}"
    return f"{top}/{name}" if top == "infra" and len(below) > 1 else top


def lines_by_area(lines_by_path: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the lines of each area; files that are no source do not count."""
    lines: Counter[str] = Counter()
    for name, count in lines_by_path:
        path = PurePosixPath(name)
        if path.suffix in SUFFIXES and path.parts[0] in TOPS:
            lines[area_of(path)] += count
    return lines


def lines_of_tree(root: Path = ROOT) -> Counter[str]:
    """Count the lines of the working tree's source."""
    paths = [path for top in TOPS for path in (root / top).rglob("*") if path.suffix in SUFFIXES]
    return lines_by_area((path.relative_to(root).as_posix(), path.read_bytes().count(b"\n")) for path in paths)


def lines_of_commit(commit: str) -> Counter[str] | None:
    """Count the lines of a commit's source; None where this clone lacks the commit."""
    command = ["git", "grep", "-c", "", commit, "--", *TOPS]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if counted.returncode:
        return None
    rows = (line.removeprefix(f"{commit}:").rpartition(":") for line in counted.stdout.splitlines())
    return lines_by_area((name, int(count)) for name, _, count in rows)


def read_table() -> dict[str, Row]:
    """Read the rows by area."""
    rows = (line.split("\t") for line in TABLE.read_text().splitlines()[1:])
    return {area: Row(int(limit), reason) for area, limit, reason in rows}


def complaints(lines: Mapping[str, int], table: Mapping[str, Row]) -> list[str]:
    """Say which areas have more lines than their row allows, which have no row, and which rows have no area."""
    return [
        *(f"{area} has no row" for area in sorted(lines.keys() - table.keys())),
        *(f"{area} has a row, and no file" for area in sorted(table.keys() - lines.keys())),
        *(
            f"{area} has {lines[area]:,} lines, {row.limit:,} are allowed"
            for area, row in table.items()
            if lines.get(area, 0) > row.limit
        ),
    ]


def main() -> int:
    """Print the lines of each area; return 1 if one is over its row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--against", default="HEAD^", metavar="COMMIT", help="show the difference to it (default: HEAD^)"
    )  # fmt: skip
    options = parser.parse_args()
    lines, table, earlier = lines_of_tree(), read_table(), lines_of_commit(options.against)
    print(f"{'area':24}{'lines':>8}{'at most':>9}{'change':>8}")
    for area, count in sorted(lines.items(), key=lambda pair: -pair[1]):
        change = "" if earlier is None else f"{count - earlier[area]:+}"
        limit = f"{table[area].limit:,}" if area in table else "no row"
        print(f"{area:24}{count:8,}{limit:>9}{change:>8}")
    print(f"{'all':24}{lines.total():8,}")
    found = complaints(lines, table)
    for complaint in found:
        print(f"{complaint}: raise its row in tests/area_lines.tsv with a sentence why", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
