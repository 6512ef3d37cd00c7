"""Advisories on the locks' pins, by pip-audit: `python -m infra.dependencies.audit`.

Exits with 0 if no advisory is open, with 1 if one is (or if the answer is incomplete), with 3 if no source of
advisories answered, which is never the same as 0. pip-audit alone ends with 0 where a source knows no package, and
passes by pins for other machines: so it is given all pins without markers, and with them a package that has advisories.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

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


def accepted(text: str, today: date) -> list[str]:
    """Return the advisories that are accepted today; raise ValueError for an entry without reason and last day."""
    entries = tomllib.loads(text).get("advisory", [])
    for entry in entries:
        if not str(entry.get("reason", "")).strip() or type(entry.get("until")) is not date:
            raise ValueError(f"{entry}: id, reason and until (a day) are needed")
    return [entry["id"] for entry in entries if entry["until"] >= today]


def requirements(pins_to_audit: Iterable[Pin]) -> list[str]:
    """Make requirement files that hold each name once, without markers, so that all machines' versions are audited."""
    files: list[dict[str, str]] = []
    for name, version in sorted({(pin.name, pin.version) for pin in pins_to_audit}):
        if (file := next((other for other in files if name not in other), None)) is None:
            files.append(file := {})
        file[name] = version
    return ["".join(f"{name}=={version}\n" for name, version in file.items()) for file in files]


def complaints(source: str, text: str, accepted_ids: Iterable[str]) -> list[str]:
    """Return open advisories and unknown packages by one source; raise SourceUnavailable if it does not answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{text}{KNOWN_BAD.name}=={KNOWN_BAD.version}\n")
        file.flush()
        command = [
            str(TOOL), "--vulnerability-service", source, "--format", "json", "--progress-spinner", "off", "--no-deps",
            "--disable-pip", "--timeout", "15", "--requirement", file.name,
            *(f"--ignore-vuln={accepted_id}" for accepted_id in accepted_ids),
        ]  # fmt: skip
        try:
            tool = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            raise SourceUnavailable(f"no answer within {PATIENCE_S} s") from None
    try:
        dependencies = json.loads(tool.stdout)["dependencies"]
    except json.JSONDecodeError:
        last = (tool.stderr.strip().splitlines() or ["no output"])[-1]
        is_reached = not any(error_text in tool.stderr for error_text in NOT_REACHED)
        raise (RuntimeError if is_reached else SourceUnavailable)(last) from None
    lines = [
        f"{package['name']} {package['version']}: {', '.join([found['id'], *found['aliases']])};"
        f" fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in dependencies
        for found in package.get("vulns", ())
    ]
    if not any(line.startswith(f"{KNOWN_BAD.name} ") for line in lines):
        raise SourceUnavailable(f"it has no advisory on {KNOWN_BAD.name}, which has some")
    unknown = [package["name"] for package in dependencies if "skip_reason" in package]
    return [
        *(f"{name}: unknown to the source, so not audited" for name in unknown),
        *(line for line in lines if not line.startswith(f"{KNOWN_BAD.name} ")),
    ]


def main() -> int:
    """Audit all locks, print the problems, and return the exit code."""
    pins_to_audit = {pin for name in NAMES for pin in lock(name)}
    accepted_ids = accepted(ACCEPTED.read_text(), datetime.now(UTC).date())
    for source in SOURCES:
        try:
            texts = requirements(pins_to_audit)
            lines = [line for text in texts for line in complaints(source, text, accepted_ids)]
        except SourceUnavailable as problem:
            print(f"advisories of {source} could not be asked: {problem}", file=sys.stderr)
            continue
        summary = f"{len(pins_to_audit)} pins asked of {source}: {len(lines)} complaints"
        print("\n".join([*lines, summary]))
        return OPEN if lines else 0
    print("NOT AUDITED: no source of advisories could be asked", file=sys.stderr)
    return NOT_ASKED


if __name__ == "__main__":
    sys.exit(main())
