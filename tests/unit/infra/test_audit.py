"""Audit of the locks: what counts as asked, as known, as accepted."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from infra.dependencies import audit
from infra.dependencies.audit import SourceUnavailable, accepted, answer, complaints, requirements
from infra.dependencies.locks import NAMES, Pin, lock, pins

TODAY = date(2026, 11, 24)
CANARY = {
    "name": "pycrypto",
    "version": "2.6.1",
    "vulns": [{"id": "PYSEC-2017-94", "aliases": [], "fix_versions": []}],
}
WEAK = {
    "name": "starlette",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2"], "fix_versions": ["1.1"]}],
}
ENTRY = '[[advisory]]\nid = "CVE-2"\npackage = "starlette"\nreason = "no uploads"\nuntil = {}\n'


def find_complaints(
    *packages: dict[str, Any], acceptance_text: str = "", today: date = TODAY
) -> list[str]:
    return complaints(
        answer({"dependencies": [CANARY, *packages]}), accepted(acceptance_text), today
    )


@pytest.mark.parametrize("dependencies", [
    [{"name": "pycrypto", "skip_reason": "not found"}, {"name": "numpy", "skip_reason": "not found"}],
    [{**CANARY, "vulns": []}, {"name": "numpy", "version": "2", "vulns": []}],
    [],
])  # fmt: skip
def test_a_source_that_knows_nothing_bad_of_a_bad_version_was_not_asked(
    dependencies: list[dict[str, Any]],
) -> None:
    with pytest.raises(SourceUnavailable):
        answer({"dependencies": dependencies})


def test_an_advisory_is_reported_with_its_ids_and_its_remedy() -> None:
    assert find_complaints(WEAK) == ["starlette 1.0: CVE-2, PYSEC-1; mended in 1.1"]
    assert find_complaints() == []


def test_a_package_that_the_source_does_not_know_was_not_audited() -> None:
    assert find_complaints({"name": "x", "skip_reason": "?"}) == [
        "x: unknown to the source, so not audited"
    ]


def test_an_accepted_advisory_counts_again_once_its_day_is_over_or_nothing_stands_behind_it() -> (
    None
):
    acceptance_text = ENTRY.format("2026-11-24")

    assert find_complaints(WEAK, acceptance_text=acceptance_text) == []
    assert find_complaints(WEAK, acceptance_text=acceptance_text, today=date(2026, 11, 25)) == [
        "starlette 1.0: CVE-2, PYSEC-1; accepted until 2026-11-24 only"
    ]
    assert find_complaints(acceptance_text=acceptance_text) == [
        "starlette: CVE-2 is accepted, but no advisory any more"
    ]


@pytest.mark.parametrize("text", [
    ENTRY.format('"soon"'), ENTRY.format("2026-12-01T00:00:00"), '[[advisory]]\nid = "CVE-1"\n',
    ENTRY.format("2026-12-01").replace("no uploads", " "),
])  # fmt: skip
def test_an_acceptance_without_reason_or_end_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        accepted(text)


def test_the_file_of_accepted_advisories_can_be_read() -> None:
    accepted(audit.ACCEPTED.read_text())


@pytest.mark.parametrize(("report", "code"), [
    ({"dependencies": []}, audit.NOT_ASKED),
    ({"dependencies": [CANARY]}, 0),
    ({"dependencies": [CANARY, WEAK]}, audit.OPEN),
    ({"dependencies": [CANARY, {"name": "x", "skip_reason": "?"}]}, audit.OPEN),
    ("requests.exceptions.ConnectionError: no route", audit.NOT_ASKED),
])  # fmt: skip
def test_the_exit_code_tells_open_from_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: object, code: int
) -> None:
    tool = tmp_path / "pip-audit"
    text = report if isinstance(report, str) else json.dumps(report)
    to = ">&2" if isinstance(report, str) else ""
    tool.write_text(f"#!/bin/sh\necho '{text}' {to}\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(audit, "TOOL", tool)

    assert audit.main() == code


def test_a_source_that_hangs_was_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "pip-audit"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(audit, "TOOL", tool)
    monkeypatch.setattr(audit, "PATIENCE_S", 0.1)

    assert audit.main() == audit.NOT_ASKED


def test_a_tool_that_breaks_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "pip-audit"
    tool.write_text("#!/bin/sh\necho 'unrecognized arguments' >&2; exit 2\n")
    tool.chmod(0o755)
    monkeypatch.setattr(audit, "TOOL", tool)

    with pytest.raises(RuntimeError, match="unrecognized arguments"):
        audit.main()


def test_versions_for_other_machines_are_asked_for_too() -> None:
    two = requirements(
        [Pin("numpy", "1"), Pin("numpy", "2", "python_version > '3.12'"), Pin("a", "1")]
    )

    assert two == ["a==1\nnumpy==1\n", "numpy==2\n"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_pins_all_that_it_names_by_hash(name: str) -> None:
    text = Path(audit.__file__).parents[1].joinpath(f"locks/{name}.txt").read_text()
    heads = [line for line in text.splitlines() if not line.startswith(" ")]

    assert len(lock(name)) == len(heads) > 3
    assert all(line.endswith("\\") for line in heads)
    with pytest.raises(ValueError, match="no pinned"):
        pins("git+ssh://somewhere/numpy\n")
