"""Tables of findings, and how a test that fails at an older commit is told from one that cannot be run there."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.regressions.__main__ import NOT_RED, RED, Row, red_before, write_rows
from tests.regressions.findings import findings
from tests.unit.test_layering import ROOT

TESTS = """
import pytest

def test_wrong(): assert 1 == 2
def test_raises(): raise KeyError("remarks")
def test_lacks_a_name(): pytest.lacks()
def test_lacks_a_setting(): raise ValueError("unknown setting 'quote'; known are separator")
def test_lacks_a_module(): import cache.nothing_of_that_name
def test_right(): pass
def test_skipped(): pytest.skip("no GPU")
def test_hangs():
    while True: pass
@pytest.mark.parametrize("case", [1, 2, 3])
def test_cases(case): assert case == 1
def test_of_nobody(): raise RuntimeError("nobody chose this one")
"""
KINDS = {
    "test_wrong": "assertion",
    "test_raises": "exception",
    "test_lacks_a_name": "interface",
    "test_lacks_a_setting": "interface",
    "test_lacks_a_module": "import",
    "test_right": "passed",
    "test_skipped": "skipped",
    "test_hangs": "timeout",
}


def test_a_row_names_a_test_that_there_is_or_a_reason() -> None:
    for finding in findings():
        if finding.has_test:
            text = (ROOT / finding.module).read_text()
            assert re.search(rf"def {finding.function}\(", text), finding
        else:
            assert len(finding.test) > len("none: ") + 20, finding


def test_no_finding_stands_in_two_rows_with_one_test() -> None:
    rows = Counter(findings())

    assert [row for row, count in rows.items() if count > 1] == []


def outcomes(folder: Path, text: str, test_names: list[str]) -> list[tuple[str, str]]:
    """Test and kind of each line that a run of pytest with the plugin writes."""
    (folder / "test_there.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "chosen").write_text("\n".join(f"test_there.py::{test}" for test in test_names))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--rootdir", folder,
        "-p", "tests.regressions.outcomes", "--chosen", folder / "chosen", "--outcomes", folder / "written",
        "--case-timeout", "1", folder / "test_there.py",
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, check=False)
    lines = [json.loads(line) for line in (folder / "written").read_text().splitlines()]
    return [(line["test"].removeprefix("test_there.py::"), line["kind"]) for line in lines if "kind" in line]


def test_each_way_to_fail_has_its_kind(tmp_path: Path) -> None:
    assert dict(outcomes(tmp_path, TESTS, list(KINDS))) == KINDS
    assert set(KINDS.values()) <= {*RED, *NOT_RED}


def test_one_case_that_fails_is_enough(tmp_path: Path) -> None:
    assert outcomes(tmp_path, TESTS, ["test_cases"]) == [("test_cases", "passed"), ("test_cases", "assertion")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import cache.nothing_of_that_name", "import"),
        ("import pytest\nSETTING = pytest.lacks", "interface"),
        ("import pytest\npytest.skip('no torch', allow_module_level=True)", "skipped"),
        ("RATIO = 1 / 0", "collection"),
    ],
)
def test_a_module_that_cannot_be_read_is_told_for_each_of_its_tests(tmp_path: Path, text: str, kind: str) -> None:
    assert outcomes(tmp_path, text, ["test_a", "test_b"]) == [("test_a", kind), ("test_b", kind)]


def test_a_run_goes_on_from_what_was_red(tmp_path: Path) -> None:
    rows = [
        Row("a 1: so", "t::a", "0123", "4567", "assertion", "why"),
        Row("a 2: so", "t::b", "0123", "4567", "passed", ""),
        Row("a 3: so", "", "", "", "none", "why"),
    ]
    write_rows(tmp_path / "rows.json", rows)

    assert {test: outcome.kind for test, outcome in red_before(tmp_path / "rows.json").items()} == {"t::a": "assertion"}
