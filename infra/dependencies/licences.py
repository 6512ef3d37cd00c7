"""Licences of the locks' pins, from installed metadata: `python -m infra.dependencies.licences`.

`--list` prints each; `--write` writes `docs/reference/licences.md`, the page of the packages that an installation of
the service contains.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from infra.dependencies.locks import Pin, lock

ALLOWED = Path(__file__).with_name("allowed.toml")
PAGE = Path(__file__).parents[2] / "docs/reference/licences.md"
SHIPPED = "serving"
LOCKS = ("serving", "airflow", "all")
CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(?P<name>.+)")
EXPRESSION_TOKENS = re.compile(r"[()]|[^\s()]+")
HEAD = """# Licences

What `infra/locks/serving.txt` brings along: what the image of the service ships beside Larder's own code (Apache-2.0),
Python and Debian. Made by `python -m infra.dependencies.licences --write` from the packages' own metadata; a test holds
that it is true. The versions stand in the lock; the texts lie in each package's `*.dist-info`. Wheels may hold compiled
libraries of others, which their own licence files name.

| package | licence |
|---|---|
"""


@dataclass(frozen=True)
class Rules:
    """Allowed licences, other spellings of them, and packages allowed by name."""

    allowed: frozenset[str]
    spelled: dict[str, str]
    exceptions: dict[str, dict[str, str]]
    elsewhere: dict[str, str]


@dataclass(frozen=True)
class Licences:
    """Licences by package, complaints, and pins that this machine could not check."""

    licences: dict[str, str]
    complaints: tuple[str, ...]
    unseen: tuple[str, ...]


UNDECLARED = "no licence"
"""Name for the licence of a package that declares none, in exceptions and complaints."""


def rules(text: str) -> Rules:
    """Read the file of allowed licences; raise `ValueError` for an exception without a reason."""
    read = tomllib.loads(text)
    for name, licence_exception in read["exceptions"].items():
        if not (licence_exception.get("licence") and licence_exception.get("reason")):
            raise ValueError(f"{name}: an exception needs a licence and a reason")
    return Rules(frozenset(read["allowed"]), read["spelled"], read["exceptions"], read["elsewhere"])


def licence_of(metadata: Message, spelled: dict[str, str]) -> str:
    """Return the SPDX expression that a distribution declares, else its free text; empty for none."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    line, *more = (metadata.get("License") or "UNKNOWN").strip().splitlines() or ["UNKNOWN"]
    if not more and line in spelled:
        return spelled[line]
    # A whole text in the field, or a word that nobody can judge: what it is classified as says more.
    named = [CLASSIFIER.match(classifier) for classifier in metadata.get_all("Classifier") or []]
    licence_names = sorted(
        {
            spelled.get(classifier_match["name"], classifier_match["name"])
            for classifier_match in named
            if classifier_match
        }
    )
    return " AND ".join(licence_names) or ("" if line == "UNKNOWN" or more else line)


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """True if one side of each OR, and both of each AND, are on the list (SPDX: AND binds first)."""
    tokens = EXPRESSION_TOKENS.findall(expression)

    def either() -> bool:
        is_any_allowed = parse_conjunction()
        while tokens and tokens[0].upper() == "OR":
            tokens.pop(0)
            is_any_allowed = parse_conjunction() or is_any_allowed
        return is_any_allowed

    def parse_conjunction() -> bool:
        is_every_allowed = parse_operand()
        while tokens and tokens[0].upper() == "AND":
            tokens.pop(0)
            is_every_allowed = parse_operand() and is_every_allowed
        return is_every_allowed

    def parse_operand() -> bool:
        if tokens and tokens[0] == "(":
            tokens.pop(0)
            is_group_allowed = either()
            return bool(tokens) and tokens.pop(0) == ")" and is_group_allowed
        name = []
        while tokens and tokens[0].upper() not in ("AND", "OR", ")", "("):
            name.append(tokens.pop(0))
        return " ".join(name) in allowed

    return either() and not tokens


def judge_pins(lock_pins: Iterable[tuple[str, Pin]], licence_rules: Rules) -> Licences:
    """Judge all pins, each given with the name of its lock, by the metadata installed here."""
    licences: dict[str, str] = {}
    complaints: dict[str, None] = {}
    unseen: dict[str, None] = {}
    for name, pin in lock_pins:
        if not pin.is_for_this_machine():
            unseen[f"{pin.name} {pin.version} ({pin.marker})"] = None
            licences.setdefault(pin.name, licence_rules.elsewhere.get(pin.name, ""))
            continue
        try:
            distribution = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            complaints[f"{pin.name}: in {name}.txt, not installed"] = None
            continue
        if distribution.version != pin.version:
            complaints[f"{pin.name}: {distribution.version} is installed, not {pin.version}"] = None
        licences[pin.name] = licence_of(distribution.metadata, licence_rules.spelled)  # type: ignore[arg-type]
        if licence_rules.elsewhere.get(pin.name, licences[pin.name]) != licences[pin.name]:
            complaints[f"{pin.name}: {licences[pin.name]}, not as said under elsewhere"] = None
    standing = {pin.name: set[str]() for _, pin in lock_pins}
    for name, pin in lock_pins:
        standing[pin.name].add(name)
    for package, licence in licences.items():
        complaints |= dict.fromkeys(_judged(package, licence, standing[package], licence_rules))
    obsolete_exceptions = [
        package_name for package_name in licence_rules.exceptions if package_name not in standing
    ]
    complaints |= dict.fromkeys(
        f"{package_name}: an exception for what no lock has" for package_name in obsolete_exceptions
    )
    return Licences(licences, tuple(complaints), tuple(unseen))


def _judged(package: str, licence: str, locks: set[str], licence_rules: Rules) -> list[str]:
    excepted = licence_rules.exceptions.get(package)
    declared_licence = licence or UNDECLARED
    if excepted is None:
        return (
            []
            if is_allowed(licence, licence_rules.allowed)
            else [f"{package}: {declared_licence}, not allowed"]
        )
    if excepted["licence"] != declared_licence:
        return [f"{package}: {declared_licence}, excepted as {excepted['licence']}"]
    return [f"{package}: excepted, and shipped with the service"] if SHIPPED in locks else []


def page(licences: dict[str, str]) -> str:
    """Return the page of the packages shipped with the service."""
    names = sorted({pin.name for pin in lock(SHIPPED)})
    return HEAD + "".join(f"| {name} | {licences[name]} |\n" for name in names)


def pinned() -> list[tuple[str, Pin]]:
    """Return all pins of the locks that are installed somewhere, with the lock's name."""
    return [(name, pin) for name in LOCKS for pin in lock(name)]


def main(arguments: list[str]) -> int:
    """Judge all licences, print unchecked ones and complaints, and exit with the result."""
    licence_report = judge_pins(pinned(), rules(ALLOWED.read_text()))
    if arguments == ["--write"]:
        PAGE.write_text(page(licence_report.licences))
    if arguments == ["--list"]:
        for name, licence in sorted(licence_report.licences.items()):
            print(f"{name}: {licence}")
    for unseen_pin in licence_report.unseen:
        print(f"not looked at on this machine: {unseen_pin}")
    for complaint in licence_report.complaints:
        print(f"refused: {complaint}", file=sys.stderr)
    print(f"{len(licence_report.licences)} packages, {len(licence_report.complaints)} refused")
    return 1 if licence_report.complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
