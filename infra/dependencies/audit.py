"""Advisories on the locks' pins, from pip-audit's sources: `python -m infra.dependencies.audit`.

Exits with 0 if no advisory is open, with 1 if one is (or if the answer is incomplete), with 3 if no source
of advisories answered, which is never the same as 0.
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
"""Abandoned package with published advisories: a source without them is not usable."""
NOT_REACHED = (
    "ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "Could not connect",
    "Failed to resolve", "HTTPError", "JSONDecodeError",
)  # fmt: skip
OPEN, NOT_ASKED = 1, 3
PATIENCE_S = 600
"""Seconds that a source has for one file of requirements."""


class SourceUnavailable(Exception):
    """A source did not answer: nothing is known about the audited packages."""


@dataclass(frozen=True)
class Advisory:
    """Published weakness of one version of a package; `ids` are all its names."""

    package: str
    version: str
    ids: frozenset[str]
    fixed_in: tuple[str, ...]


@dataclass(frozen=True)
class Acceptance:
    """Advisory that is accepted up to and including a day."""

    id: str
    package: str
    reason: str
    until: date


@dataclass(frozen=True)
class SourceAnswer:
    """Answer of a source: advisories, and the packages that it does not know."""

    advisories: tuple[Advisory, ...]
    unknown: tuple[str, ...]


def accepted(text: str) -> tuple[Acceptance, ...]:
    """Read the file of accepted advisories; raise `TypeError` or `ValueError` for an entry without its four parts."""
    entries = [Acceptance(**acceptance) for acceptance in tomllib.loads(text).get("advisory", [])]
    for acceptance in entries:
        if not (
            acceptance.id
            and acceptance.package
            and acceptance.reason.strip()
            and type(acceptance.until) is date
        ):
            raise ValueError(f"{acceptance.id}: id, package, reason and until (a day) are needed")
    return tuple(entries)


def answer(report: dict[str, Any]) -> SourceAnswer:
    """Read a report; raise `SourceUnavailable` if it lacks the version known to be bad."""
    advisories, unknown = [], []
    for dependency in report["dependencies"]:
        if "skip_reason" in dependency:
            unknown.append(dependency["name"])
        for vulnerability in dependency.get("vulns", ()):
            ids = frozenset({vulnerability["id"], *vulnerability["aliases"]})
            fixed = tuple(vulnerability["fix_versions"])
            advisories.append(Advisory(dependency["name"], dependency["version"], ids, fixed))
    if not any(advisory.package == KNOWN_BAD.name for advisory in advisories):
        raise SourceUnavailable(
            f"it has no advisory on {KNOWN_BAD.name} {KNOWN_BAD.version}, which has some"
            f" ({len(unknown)} of {len(report['dependencies'])} packages are unknown to it)"
        )
    other_advisories = tuple(
        advisory for advisory in advisories if advisory.package != KNOWN_BAD.name
    )
    return SourceAnswer(other_advisories, tuple(unknown))


def complaints(
    source_answer: SourceAnswer, acceptances: Sequence[Acceptance], today: date
) -> list[str]:
    """Return the problems that block a release, one line each: unaudited, open, and outdated ones."""
    lines = [f"{name}: unknown to the source, so not audited" for name in source_answer.unknown]
    for advisory in source_answer.advisories:
        fitting = [
            acceptance
            for acceptance in acceptances
            if acceptance.package == advisory.package and acceptance.id in advisory.ids
        ]
        advisory_text = f"{advisory.package} {advisory.version}: {', '.join(sorted(advisory.ids))}"
        if not fitting:
            remedy = (
                f"mended in {', '.join(advisory.fixed_in)}" if advisory.fixed_in else "not mended"
            )
            lines.append(f"{advisory_text}; {remedy}")
        elif all(acceptance.until < today for acceptance in fitting):
            lines.append(f"{advisory_text}; accepted until {fitting[0].until} only")
    lines.extend(
        f"{acceptance.package}: {acceptance.id} is accepted, but no advisory any more"
        for acceptance in acceptances
        if not any(
            acceptance.package == a.package and acceptance.id in a.ids
            for a in source_answer.advisories
        )
    )
    return lines


def requirements(pins_to_audit: Iterable[Pin]) -> list[str]:
    """Make requirement files that hold each name once, without markers, so that all machines' versions are audited."""
    files: list[dict[str, str]] = []
    for pin in sorted({(locked_pin.name, locked_pin.version) for locked_pin in pins_to_audit}):
        file = next(
            (version_by_name for version_by_name in files if pin[0] not in version_by_name), None
        )
        if file is None:
            files.append(file := {})
        file[pin[0]] = pin[1]
    return [
        "".join(f"{name}=={version}\n" for name, version in version_by_name.items())
        for version_by_name in files
    ]


def query_source(source: str, pins_to_audit: Iterable[Pin]) -> SourceAnswer:
    """Query one source about all of them; raise `SourceUnavailable` if it does not answer."""
    answers = [answer(_report(source, text)) for text in requirements(pins_to_audit)]
    advisories = {
        advisory: None for source_answer in answers for advisory in source_answer.advisories
    }
    unknown = {name: None for source_answer in answers for name in source_answer.unknown}
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
            completed_process = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            raise SourceUnavailable(f"no answer within {PATIENCE_S} s") from None
    try:
        return dict(json.loads(completed_process.stdout))
    except json.JSONDecodeError:
        last = (completed_process.stderr.strip().splitlines() or ["no output"])[-1]
        if any(error_text in completed_process.stderr for error_text in NOT_REACHED):
            raise SourceUnavailable(last) from None
        raise RuntimeError(f"pip-audit ended with {completed_process.returncode}: {last}") from None


def main() -> int:
    """Audit all locks, print the problems, and return the exit code."""
    pins_to_audit = {pin for name in NAMES for pin in lock(name)}
    for source in SOURCES:
        try:
            source_answer = query_source(source, pins_to_audit)
        except SourceUnavailable as problem:
            print(f"advisories of {source} could not be asked: {problem}", file=sys.stderr)
            continue
        complaint_lines = complaints(
            source_answer, accepted(ACCEPTED.read_text()), datetime.now(UTC).date()
        )
        print(
            "\n".join(
                [
                    *complaint_lines,
                    f"{len(pins_to_audit)} pins asked of {source}: {len(complaint_lines)} complaints",
                ]
            )
        )
        return OPEN if complaint_lines else 0
    print("NOT AUDITED: no source of advisories could be asked", file=sys.stderr)
    return NOT_ASKED


if __name__ == "__main__":
    sys.exit(main())
