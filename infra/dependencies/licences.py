"""Licences of what the locks pin, from installed metadata: `python -m infra.dependencies.licences`.

With `--list` each is named; with `--write` `docs/reference/licences.md` is made anew, the page of what an installation
of the service brings along.
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
WORDS = re.compile(r"[()]|[^\s()]+")
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
    """Allowed licences, other spellings of them, and what is let through by name."""

    allowed: frozenset[str]
    spelled: dict[str, str]
    exceptions: dict[str, dict[str, str]]
    elsewhere: dict[str, str]


@dataclass(frozen=True)
class Licences:
    """Licences by package, complaints, and what this machine could not look at."""

    licences: dict[str, str]
    complaints: tuple[str, ...]
    unseen: tuple[str, ...]


UNDECLARED = "no licence"
"""Word of an exception, and of a complaint, for a package that declares none."""


def rules(text: str) -> Rules:
    """Read the file of allowed licences; raises `ValueError` for an exception without a reason."""
    read = tomllib.loads(text)
    for name, each in read["exceptions"].items():
        if not (each.get("licence") and each.get("reason")):
            raise ValueError(f"{name}: an exception needs a licence and a reason")
    return Rules(frozenset(read["allowed"]), read["spelled"], read["exceptions"], read["elsewhere"])


def licence_of(metadata: Message, spelled: dict[str, str]) -> str:
    """SPDX expression that a distribution declares, else the words that it has; empty for none."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    line, *more = (metadata.get("License") or "UNKNOWN").strip().splitlines() or ["UNKNOWN"]
    if not more and line in spelled:
        return spelled[line]
    # A whole text in the field, or a word that nobody can judge: what it is classified as says more.
    named = [CLASSIFIER.match(each) for each in metadata.get_all("Classifier") or []]
    words = sorted({spelled.get(each["name"], each["name"]) for each in named if each})
    return " AND ".join(words) or ("" if line == "UNKNOWN" or more else line)


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """True if one side of each OR, and both of each AND, are on the list (SPDX: AND binds first)."""
    words = WORDS.findall(expression)

    def either() -> bool:
        found = both()
        while words and words[0].upper() == "OR":
            words.pop(0)
            found = both() or found
        return found

    def both() -> bool:
        found = one()
        while words and words[0].upper() == "AND":
            words.pop(0)
            found = one() and found
        return found

    def one() -> bool:
        if words and words[0] == "(":
            words.pop(0)
            found = either()
            return bool(words) and words.pop(0) == ")" and found
        name = []
        while words and words[0].upper() not in ("AND", "OR", ")", "("):
            name.append(words.pop(0))
        return " ".join(name) in allowed

    return either() and not words


def look(wanted: Iterable[tuple[str, Pin]], known: Rules) -> Licences:
    """Judge all pins, each with the lock that it stands in, by what is installed here."""
    licences: dict[str, str] = {}
    complaints: dict[str, None] = {}
    unseen: dict[str, None] = {}
    for name, pin in wanted:
        if not pin.is_for_this_machine():
            unseen[f"{pin.name} {pin.version} ({pin.marker})"] = None
            licences.setdefault(pin.name, known.elsewhere.get(pin.name, ""))
            continue
        try:
            found = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            complaints[f"{pin.name}: in {name}.txt, not installed"] = None
            continue
        if found.version != pin.version:
            complaints[f"{pin.name}: {found.version} is installed, not {pin.version}"] = None
        licences[pin.name] = licence_of(found.metadata, known.spelled)  # type: ignore[arg-type]
        if known.elsewhere.get(pin.name, licences[pin.name]) != licences[pin.name]:
            complaints[f"{pin.name}: {licences[pin.name]}, not as said under elsewhere"] = None
    standing = {pin.name: set[str]() for _, pin in wanted}
    for name, pin in wanted:
        standing[pin.name].add(name)
    for package, licence in licences.items():
        complaints |= dict.fromkeys(_judged(package, licence, standing[package], known))
    gone = [each for each in known.exceptions if each not in standing]
    complaints |= dict.fromkeys(f"{each}: an exception for what no lock has" for each in gone)
    return Licences(licences, tuple(complaints), tuple(unseen))


def _judged(package: str, licence: str, locks: set[str], known: Rules) -> list[str]:
    excepted = known.exceptions.get(package)
    told = licence or UNDECLARED
    if excepted is None:
        return [] if is_allowed(licence, known.allowed) else [f"{package}: {told}, not allowed"]
    if excepted["licence"] != told:
        return [f"{package}: {told}, excepted as {excepted['licence']}"]
    return [f"{package}: excepted, and shipped with the service"] if SHIPPED in locks else []


def page(licences: dict[str, str]) -> str:
    """Write the page of what is shipped with the service."""
    names = sorted({pin.name for pin in lock(SHIPPED)})
    return HEAD + "".join(f"| {name} | {licences[name]} |\n" for name in names)


def pinned() -> list[tuple[str, Pin]]:
    """All pins of the locks that are installed somewhere, with the lock."""
    return [(name, pin) for name in LOCKS for pin in lock(name)]


def main(arguments: list[str]) -> int:
    """Look at all licences, say what could not be looked at, and complain."""
    found = look(pinned(), rules(ALLOWED.read_text()))
    if arguments == ["--write"]:
        PAGE.write_text(page(found.licences))
    if arguments == ["--list"]:
        for name, licence in sorted(found.licences.items()):
            print(f"{name}: {licence}")
    for each in found.unseen:
        print(f"not looked at on this machine: {each}")
    for each in found.complaints:
        print(f"refused: {each}", file=sys.stderr)
    print(f"{len(found.licences)} packages, {len(found.complaints)} refused")
    return 1 if found.complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
