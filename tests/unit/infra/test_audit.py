"""Audit of the locks: what counts as asked, as known, as accepted."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from infra.dependencies import audit
from infra.dependencies.audit import SourceUnavailable, accepted_advisories, list_complaints, make_requirement_files
from infra.dependencies.locks import LOCK_NAMES, Pin, parse_pins, read_lock

TODAY = date(2026, 11, 24)
CANARY = {"name": "pycrypto", "version": "2.6.1", "vulns": [{"id": "PYSEC-2017-94", "aliases": [], "fix_versions": []}]}
WEAK = {
    "name": "starlette",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2"], "fix_versions": ["1.1"]}],
}
ENTRY = '[[advisory]]\nid = "CVE-2"\nreason = "no uploads"\nuntil = {}\n'


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip-audit that tests write, in place of the installed one."""
    fake = tmp_path / "pip-audit"
    monkeypatch.setattr(audit, "PIP_AUDIT_PATH", fake)
    return fake


def write(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def report(tool: Path, *packages: dict[str, Any]) -> None:
    """Let the tool tell of these packages, and end as if it had found something."""
    write(tool, f"echo '{json.dumps({'dependencies': packages})}'; exit 1")


@pytest.mark.parametrize("packages", [
    [{"name": "pycrypto", "skip_reason": "not found"}, {"name": "numpy", "skip_reason": "not found"}],
    [{**CANARY, "vulns": []}, {"name": "numpy", "version": "2", "vulns": []}],
    [],
])  # fmt: skip
def test_a_source_that_knows_nothing_bad_of_a_bad_version_was_not_asked(
    tool: Path, packages: list[dict[str, Any]]
) -> None:
    report(tool, *packages)

    with pytest.raises(SourceUnavailable):
        list_complaints("pypi", "numpy==2\n", [])


def test_open_advisories_and_unknown_packages_are_reported(tool: Path) -> None:
    report(tool, CANARY, WEAK, {"name": "x", "skip_reason": "?"})

    assert list_complaints("pypi", "", []) == [
        "x: unknown to the source, so not audited",
        "starlette 1.0: PYSEC-1, CVE-2; fixed in 1.1",
    ]


def test_the_tool_is_given_all_pins_and_the_known_bad_one(tool: Path) -> None:
    write(tool, 'for word; do case $word in *.txt) tr "\\n" " " <"$word" >&2;; esac; done; exit 2')

    with pytest.raises(RuntimeError, match=r"numpy==2 pycrypto==2\.6\.1"):
        list_complaints("osv", "numpy==2\n", [])


def test_an_advisory_is_accepted_until_its_last_day() -> None:
    text = ENTRY.format("2026-11-24")

    assert accepted_advisories(text, TODAY) == ["CVE-2"]
    assert accepted_advisories(text, date(2026, 11, 25)) == []
    assert accepted_advisories(audit.ACCEPTED_FILE.read_text(), TODAY) == []


@pytest.mark.parametrize("text", [
    ENTRY.format('"soon"'), ENTRY.format("2026-12-01T00:00:00"), '[[advisory]]\nid = "CVE-1"\n',
    ENTRY.format("2026-12-01").replace("no uploads", " "),
])  # fmt: skip
def test_an_acceptance_without_reason_or_end_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="reason and until"):
        accepted_advisories(text, TODAY)


@pytest.mark.parametrize(("packages", "code"), [
    ([], audit.EXIT_NOT_ASKED), ([CANARY], 0), ([CANARY, WEAK], audit.EXIT_OPEN),
    ([CANARY, {"name": "x", "skip_reason": "?"}], audit.EXIT_OPEN),
])  # fmt: skip
def test_the_exit_code_tells_open_from_not_asked(tool: Path, packages: list[dict[str, Any]], code: int) -> None:
    report(tool, *packages)

    assert audit.main() == code


def test_an_accepted_advisory_is_not_asked_for(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accepted.toml").write_text(ENTRY.format("2999-01-01"))
    monkeypatch.setattr(audit, "ACCEPTED_FILE", tmp_path / "accepted.toml")
    open_text, accepted_text = (json.dumps({"dependencies": packages}) for packages in ([CANARY, WEAK], [CANARY]))
    write(tool, f"case $* in *--ignore-vuln=CVE-2*) echo '{accepted_text}';; *) echo '{open_text}';; esac")

    assert audit.main() == 0


def test_a_source_that_hangs_or_is_not_reached_was_not_asked(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tool, "echo 'requests.exceptions.ConnectionError: no route' >&2; exit 1")
    assert audit.main() == audit.EXIT_NOT_ASKED

    monkeypatch.setattr(audit, "SOURCE_TIMEOUT_S", 0.1)
    write(tool, "exec sleep 60")
    assert audit.main() == audit.EXIT_NOT_ASKED


def test_a_tool_that_breaks_is_neither(tool: Path) -> None:
    write(tool, "echo 'unrecognized arguments' >&2; exit 2")

    with pytest.raises(RuntimeError, match="unrecognized arguments"):
        audit.main()


def test_versions_for_other_machines_are_asked_for_too() -> None:
    two = make_requirement_files([Pin("numpy", "1"), Pin("numpy", "2", "python_version > '3.12'"), Pin("a", "1")])

    assert two == ["a==1\nnumpy==1\n", "numpy==2\n"]


@pytest.mark.parametrize("name", LOCK_NAMES)
def test_a_lock_pins_all_that_it_names_by_hash(name: str) -> None:
    text = Path(audit.__file__).parents[1].joinpath(f"locks/{name}.txt").read_text()
    heads = [line for line in text.splitlines() if not line.startswith(" ")]

    assert len(read_lock(name)) == len(heads) > 3
    assert all(line.endswith("\\") for line in heads)
    with pytest.raises(ValueError, match="no pinned"):
        parse_pins("git+ssh://somewhere/numpy\n")
