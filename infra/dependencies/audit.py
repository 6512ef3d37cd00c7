"""Advisories on what the locks pin, asked of pip-audit's sources: `python -m infra.dependencies.audit`.

Ends with 0 where no advisory is open, with 1 where one is (or where the answer is incomplete), with 3 where no source
of advisories could be asked, which is never the same as 0.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from infra.dependencies.locks import NAMES, Pin, lock

TOOL = Path(__file__).parents[2] / ".venv-audit/bin/pip-audit"
ACCEPTED = Path(__file__).with_name("accepted.toml")
SOURCES = ("pypi", "osv")
KNOWN_BAD = Pin("pycrypto", "2.6.1")
"""Abandoned, with published advisories: a source that knows none of them is no source of advisories."""
NOT_REACHED = (
    "ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "Could not connect",
    "Failed to resolve", "HTTPError", "JSONDecodeError",
)  # fmt: skip
OPEN, NOT_ASKED = 1, 3
PATIENCE_S = 600
"""Seconds that a source has for one file of requirements."""


class NotAsked(Exception):
    """No answer from a source: nothing is known about what was to be audited."""


@dataclass(frozen=True)
class Advisory:
    """Published weakness of one version of a package; `ids` are all its names."""

    package: str
    version: str
    ids: frozenset[str]
    fixed_in: tuple[str, ...]


@dataclass(frozen=True)
class Acceptance:
    """Advisory that is lived with up to and with a day."""

    id: str
    package: str
    reason: str
    until: date


@dataclass(frozen=True)
class SourceAnswer:
    """All that a source said: advisories, and the packages that it does not know."""

    advisories: tuple[Advisory, ...]
    unknown: tuple[str, ...]


def accepted(text: str) -> tuple[Acceptance, ...]:
    """Read the file of accepted advisories; raises `TypeError` or `ValueError` for an entry without its four parts."""
    entries = [Acceptance(**each) for each in tomllib.loads(text).get("advisory", [])]
    for each in entries:
        if not (each.id and each.package and each.reason.strip() and type(each.until) is date):
            raise ValueError(f"{each.id}: id, package, reason and until (a day) are needed")
    return tuple(entries)


def answer(report: dict[str, Any]) -> SourceAnswer:
    """Read a report; raises `NotAsked` where the source had nothing on a version known to be bad."""
    advisories, unknown = [], []
    for each in report["dependencies"]:
        if "skip_reason" in each:
            unknown.append(each["name"])
        for found in each.get("vulns", ()):
            ids = frozenset({found["id"], *found["aliases"]})
            fixed = tuple(found["fix_versions"])
            advisories.append(Advisory(each["name"], each["version"], ids, fixed))
    if not any(each.package == KNOWN_BAD.name for each in advisories):
        raise NotAsked(
            f"it has no advisory on {KNOWN_BAD.name} {KNOWN_BAD.version}, which has some"
            f" ({len(unknown)} of {len(report['dependencies'])} packages are unknown to it)"
        )
    others = tuple(each for each in advisories if each.package != KNOWN_BAD.name)
    return SourceAnswer(others, tuple(unknown))


def complaints(said: SourceAnswer, taken: Sequence[Acceptance], today: date) -> list[str]:
    """All that stands in the way of a release, one line each."""
    lines = [f"{name}: unknown to the source, so not audited" for name in said.unknown]
    for found in said.advisories:
        fitting = [each for each in taken if each.package == found.package and each.id in found.ids]
        told = f"{found.package} {found.version}: {', '.join(sorted(found.ids))}"
        if not fitting:
            remedy = f"mended in {', '.join(found.fixed_in)}" if found.fixed_in else "not mended"
            lines.append(f"{told}; {remedy}")
        elif all(each.until < today for each in fitting):
            lines.append(f"{told}; accepted until {fitting[0].until} only")
    lines.extend(
        f"{each.package}: {each.id} is accepted, but no advisory any more"
        for each in taken
        if not any(each.package == a.package and each.id in a.ids for a in said.advisories)
    )
    return lines


def requirements(wanted: Iterable[Pin]) -> list[str]:
    """Make requirement files that hold each name once, markers left out: no machine's versions go unasked."""
    files: list[dict[str, str]] = []
    for pin in sorted({(each.name, each.version) for each in wanted}):
        file = next((each for each in files if pin[0] not in each), None)
        if file is None:
            files.append(file := {})
        file[pin[0]] = pin[1]
    return ["".join(f"{name}=={version}\n" for name, version in each.items()) for each in files]


def ask(source: str, wanted: Iterable[Pin]) -> SourceAnswer:
    """Ask one source about all of them; raises `NotAsked` where it does not answer."""
    answers = [answer(_report(source, text)) for text in requirements(wanted)]
    advisories = {found: None for each in answers for found in each.advisories}
    unknown = {name: None for each in answers for name in each.unknown}
    return SourceAnswer(tuple(advisories), tuple(unknown))


def _report(source: str, text: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{text}{KNOWN_BAD.name}=={KNOWN_BAD.version}\n")
        file.flush()
        command = [
            str(TOOL), "--vulnerability-service", source, "--format", "json", "--progress-spinner", "off",
            "--no-deps", "--disable-pip", "--timeout", "15", "--requirement", file.name,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            raise NotAsked(f"no answer within {PATIENCE_S} s") from None
    try:
        return dict(json.loads(done.stdout))
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if any(word in done.stderr for word in NOT_REACHED):
            raise NotAsked(last) from None
        raise RuntimeError(f"pip-audit ended with {done.returncode}: {last}") from None


def main() -> int:
    """Audit all locks and say what was found."""
    wanted = {pin for name in NAMES for pin in lock(name)}
    for source in SOURCES:
        try:
            said = ask(source, wanted)
        except NotAsked as problem:
            print(f"advisories of {source} could not be asked: {problem}", file=sys.stderr)
            continue
        found = complaints(said, accepted(ACCEPTED.read_text()), datetime.now(UTC).date())
        print("\n".join([*found, f"{len(wanted)} pins asked of {source}: {len(found)} complaints"]))
        return OPEN if found else 0
    print("NOT AUDITED: no source of advisories could be asked", file=sys.stderr)
    return NOT_ASKED


if __name__ == "__main__":
    sys.exit(main())
