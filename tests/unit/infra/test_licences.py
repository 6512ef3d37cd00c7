"""Licences of what the locks pin: allowed, or let through by name."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infra.dependencies import licences
from infra.dependencies.licences import (
    JUDGED_LOCKS,
    PAGE_PATH,
    RULES_FILE,
    SHIPPED_LOCK,
    judge_licences,
    read_installed_licences,
)
from infra.dependencies.locks import Pin, read_lock

RULES: dict[str, Any] = {"allowed": ["MIT", "BSD License"], "exceptions": {}, "elsewhere": {}}
PIN = Pin("pytest", "9.0")


def judged(licence: str, *, lock_name: str = "all", **rules: Any) -> list[str]:
    _, complaints = judge_licences({lock_name: [PIN]}, {"pytest": ("9.0", licence)}, RULES | rules)
    return complaints


@pytest.mark.parametrize(("licence", "complaints"), [
    ("MIT", []), ("BSD License; MIT", []), ("GPL-3.0-only", ["pytest: GPL-3.0-only, not allowed"]),
    ("MIT; GPL-3.0-only", ["pytest: MIT; GPL-3.0-only, not allowed"]),
    ("MIT OR GPL-3.0-only", ["pytest: MIT OR GPL-3.0-only, not allowed"]),
    ("UNKNOWN", ["pytest: UNKNOWN, not allowed"]),
])  # fmt: skip
def test_each_named_licence_is_on_the_list(licence: str, complaints: list[str]) -> None:
    assert judged(licence) == complaints


def test_a_package_that_is_not_there_or_of_another_version_is_named() -> None:
    packages = {"numpy": ("2.1", "MIT")}
    pins = [Pin("numpy", "2.0"), Pin("no-such", "1")]

    assert judge_licences({"all": pins}, packages, RULES) == (
        {},
        ["no-such: nothing is installed, not 1", "numpy: 2.1 is installed, not 2.0"],
    )


def test_a_package_for_other_machines_has_the_licence_that_is_said_of_it() -> None:
    pins = {"all": [Pin("numpy", "2", "sys_platform == 'plan9'")]}

    assert judge_licences(pins, {}, RULES)[1] == ["numpy: UNKNOWN, not allowed"]
    assert judge_licences(pins, {}, RULES | {"elsewhere": {"numpy": "MIT"}}) == ({"numpy": "MIT"}, [])


def test_an_exception_holds_for_one_licence_with_a_reason_and_never_for_the_service() -> None:
    exceptions = {"pytest": {"licence": "GPL", "reason": "of the tests alone"}}

    assert judged("GPL", exceptions=exceptions) == []
    assert judged("AGPL", exceptions=exceptions) == ["pytest: has AGPL, but the exception is for GPL"]
    assert judged("GPL", lock_name=SHIPPED_LOCK, exceptions=exceptions) == [
        "pytest: has an exception, but is part of the service"
    ]
    assert judged("GPL", exceptions={"pytest": {"licence": "GPL", "reason": ""}}) != []
    assert judged("MIT", exceptions={"gone": {"licence": "GPL", "reason": "once"}}) == [
        "gone: has an exception, but is in no lock"
    ]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip-licenses that says of this environment what the page and `allowed.toml` say of the locks."""
    rules = tomllib.loads(RULES_FILE.read_text())
    on_page = dict(row.strip("| ").split(" | ") for row in PAGE_PATH.read_text().splitlines() if " | " in row)
    licence_by_name = {name: exception["licence"] for name, exception in rules["exceptions"].items()}
    rows = [
        {"Name": pin.distribution_name, "Version": pin.pinned_version, "License": {**on_page,
        **licence_by_name}.get(pin.distribution_name, "MIT")}
        for name in JUDGED_LOCKS for pin in read_lock(name) if pin.is_for_this_machine()
    ]  # fmt: skip
    fake = tmp_path / "pip-licenses"
    fake.write_text(f"#!{sys.executable}\nprint({json.dumps(rows)!r})\n")
    fake.chmod(0o755)
    monkeypatch.setattr(licences, "PIP_LICENSES_PATH", fake)
    return fake


@pytest.mark.usefixtures("tool")
def test_the_page_of_what_is_shipped_is_held_against_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert licences.main([]) == 0, capsys.readouterr().err

    page = tmp_path / "licences.md"
    page.write_text("")
    monkeypatch.setattr(licences, "PAGE_PATH", page)
    assert licences.main([]) == 1
    assert licences.main(["--write"]) == 0
    assert licences.main([]) == 0
    assert page.read_text() == PAGE_PATH.read_text()


@pytest.mark.skipif(not licences.PIP_LICENSES_PATH.exists(), reason="no .venv-audit here: make advisories-env")
def test_every_licence_of_the_locks_is_allowed_or_excepted_with_a_reason() -> None:
    rules = tomllib.loads(RULES_FILE.read_text())
    packages = read_installed_licences()

    assert judge_licences({name: read_lock(name) for name in JUDGED_LOCKS}, packages, rules)[1] == []
