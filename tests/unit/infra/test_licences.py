"""Licences of what the locks pin: allowed, or let through by name."""

from email.message import Message

import pytest

from infra.dependencies.licences import (
    ALLOWED,
    PAGE,
    Rules,
    is_allowed,
    judge_pins,
    licence_of,
    page,
    pinned,
    rules,
)  # fmt: skip
from infra.dependencies.locks import Pin

LICENCE_RULES = rules(ALLOWED.read_text())
ACCEPTED_LICENCES = frozenset({"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"})


def test_every_licence_of_the_locks_is_allowed_or_excepted_with_a_reason() -> None:
    assert judge_pins(pinned(), LICENCE_RULES).complaints == ()


def test_the_page_of_what_is_shipped_is_true() -> None:
    assert PAGE.read_text() == page(judge_pins(pinned(), LICENCE_RULES).licences), (
        "python -m infra.dependencies.licences --write"
    )


@pytest.mark.parametrize(("expression", "expected"), [
    ("MIT", True), ("GPL-3.0-only", False), ("", False), ("MIT OR GPL-3.0-only", True),
    ("MIT AND GPL-3.0-only", False), ("MIT AND (GPL-3.0-only OR Apache-2.0)", True),
    ("GPL-3.0-only AND MIT OR MIT", True), ("Apache-2.0 WITH LLVM-exception", True), ("MIT MIT", False),
    ("(MIT", False), ("MIT)", False), ("MIT OR", True), ("MIT WITH GPL-3.0-only", False),
])  # fmt: skip
def test_an_expression_is_allowed_where_one_may_choose_only_what_is(
    expression: str, *, expected: bool
) -> None:
    assert is_allowed(expression, ACCEPTED_LICENCES) == expected


@pytest.mark.parametrize(("fields", "expected"), [
    ({"License-Expression": "MIT", "License": "GPL"}, "MIT"),
    ({"License": "MIT License"}, "MIT"),
    ({"License": "UNKNOWN"}, ""),
    ({"License": "Copyright\nmany lines"}, ""),
    ({"License": "Copyright\nmany lines", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD-3-Clause"),
    ({"License": "Do as I say"}, "Do as I say"),
    ({}, ""),
])  # fmt: skip
def test_a_licence_is_read_where_the_package_says_it(fields: dict[str, str], expected: str) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value

    assert licence_of(metadata, LICENCE_RULES.spelled) == expected


def test_what_is_not_allowed_not_there_or_another_version_is_named() -> None:
    strict = Rules(frozenset(), LICENCE_RULES.spelled, {}, {})

    assert (
        judge_pins([("all", Pin("pytest", "0"))], strict).complaints[0].endswith("installed, not 0")
    )
    assert (
        judge_pins([("all", Pin("pytest", "0"))], strict).complaints[1]
        == "pytest: MIT, not allowed"
    )
    assert judge_pins([("all", Pin("no-such", "1"))], strict).complaints == (
        "no-such: in all.txt, not installed",
    )
    assert judge_pins([("all", Pin("numpy", "2", "sys_platform == 'plan9'"))], strict).unseen == (
        "numpy 2 (sys_platform == 'plan9')",
    )


def test_an_exception_holds_for_one_licence_and_never_for_the_service() -> None:
    version = next(pin.version for _, pin in pinned() if pin.name == "pytest")
    pin = Pin("pytest", version)

    def judged(lock: str, licence: str) -> tuple[str, ...]:
        licence_rules = Rules(
            frozenset(), LICENCE_RULES.spelled, {"pytest": {"licence": licence}}, {}
        )
        return judge_pins([(lock, pin)], licence_rules).complaints

    assert judged("all", "MIT") == ()
    assert judged("all", "ISC") == ("pytest: MIT, excepted as ISC",)
    assert judged("serving", "MIT") == ("pytest: excepted, and shipped with the service",)
    assert judge_pins([], Rules(frozenset(), {}, {"gone": {}}, {})).complaints == (
        "gone: an exception for what no lock has",
    )
