"""Audit of the pinned dependencies for advisories, with pip-audit: `python -m infra.dependencies.audit`.

Exit code: 0 no open advisory, 1 an open advisory or an unknown package, 3 no source of advisories answered. pip-audit
alone exits with 0 if a source knows none of the packages, and skips pins for other platforms. It therefore gets all
pins without their markers, together with a package that is known to have advisories.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

from infra.dependencies.locks import LOCK_NAMES, Pin, read_lock

PIP_AUDIT_PATH = Path(__file__).parents[2] / ".venv-audit/bin/pip-audit"
ACCEPTED_FILE = Path(__file__).with_name("accepted.toml")
ADVISORY_SOURCES = ("pypi", "osv")
KNOWN_BAD_PIN = Pin("pycrypto", "2.6.1")
"""Abandoned package with published advisories: a source that reports none for it is not usable."""
NOT_REACHED_TEXTS = (
    "ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "Could not connect",
    "Failed to resolve", "HTTPError", "JSONDecodeError",
)  # fmt: skip
EXIT_OPEN, EXIT_NOT_ASKED = 1, 3
SOURCE_TIMEOUT_S = 600
"""Timeout in seconds for the audit of one requirements file by one source."""


class SourceUnavailable(Exception):
    """A source of advisories did not answer, so that nothing is known about the audited packages."""


def accepted_advisories(acceptance_text: str, today: date) -> list[str]:
    """Return the ids of advisories accepted today; raise ValueError for an entry without reason or end date."""
    advisory_entries = tomllib.loads(acceptance_text).get("advisory", [])
    for entry in advisory_entries:
        if not str(entry.get("reason", "")).strip() or type(entry.get("until")) is not date:
            raise ValueError(f"{entry}: id, reason and until (a date) are required")
    return [entry["id"] for entry in advisory_entries if entry["until"] >= today]


def make_requirement_files(pins_to_audit: Iterable[Pin]) -> list[str]:
    """Return requirements files without markers; a package pinned in several versions is in several files."""
    version_by_name_files: list[dict[str, str]] = []
    for name, version in sorted({(pin.distribution_name, pin.pinned_version) for pin in pins_to_audit}):
        if (
            version_by_name := next(
                (file_without_name for file_without_name in version_by_name_files if name not in file_without_name),
                None,
            )
        ) is None:
            version_by_name_files.append(version_by_name := {})
        version_by_name[name] = version
    return [
        "".join(f"{name}=={version}\n" for name, version in version_by_name.items())
        for version_by_name in version_by_name_files
    ]


def list_complaints(advisory_source: str, requirements_text: str, accepted_ids: Iterable[str]) -> list[str]:
    """Return the open advisories and unknown packages that a source reports; raise SourceUnavailable if it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements_file:
        requirements_file.write(
            f"{requirements_text}{KNOWN_BAD_PIN.distribution_name}=={KNOWN_BAD_PIN.pinned_version}\n"
        )
        requirements_file.flush()
        command = [
            str(PIP_AUDIT_PATH), "--vulnerability-service", advisory_source, "--format", "json",
            "--progress-spinner", "off", "--no-deps",
            "--disable-pip", "--timeout", "15", "--requirement", requirements_file.name,
            *(f"--ignore-vuln={accepted_id}" for accepted_id in accepted_ids),
        ]  # fmt: skip
        try:
            audit_process = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SOURCE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise SourceUnavailable(f"no answer within {SOURCE_TIMEOUT_S} s") from None
    try:
        dependencies = json.loads(audit_process.stdout)["dependencies"]
    except json.JSONDecodeError:
        last_line = (audit_process.stderr.strip().splitlines() or ["no output"])[-1]
        is_reached = not any(error_text in audit_process.stderr for error_text in NOT_REACHED_TEXTS)
        raise (RuntimeError if is_reached else SourceUnavailable)(last_line) from None
    advisory_lines = [
        f"{package['name']} {package['version']}: {', '.join([advisory['id'], *advisory['aliases']])};"
        f" fixed in {', '.join(advisory['fix_versions']) or 'no version'}"
        for package in dependencies
        for advisory in package.get("vulns", ())
    ]
    if not any(advisory_line.startswith(f"{KNOWN_BAD_PIN.distribution_name} ") for advisory_line in advisory_lines):
        raise SourceUnavailable(f"it reports no advisory on {KNOWN_BAD_PIN.distribution_name}, which has several")
    unknown_packages = [package["name"] for package in dependencies if "skip_reason" in package]
    return [
        *(f"{name}: unknown to the source, so not audited" for name in unknown_packages),
        *(
            advisory_line
            for advisory_line in advisory_lines
            if not advisory_line.startswith(f"{KNOWN_BAD_PIN.distribution_name} ")
        ),
    ]


def main() -> int:
    """Audit all locks, print the problems, and return the exit code."""
    pins_to_audit = {pin for name in LOCK_NAMES for pin in read_lock(name)}
    accepted_ids = accepted_advisories(ACCEPTED_FILE.read_text(), datetime.now(UTC).date())
    for source in ADVISORY_SOURCES:
        try:
            requirement_texts = make_requirement_files(pins_to_audit)
            complaint_lines = [
                line for text in requirement_texts for line in list_complaints(source, text, accepted_ids)
            ]
        except SourceUnavailable as problem:
            print(f"the advisories of {source} could not be read: {problem}", file=sys.stderr)
            continue
        summary = f"{len(pins_to_audit)} pins audited with {source}: {len(complaint_lines)} problems"
        print("\n".join([*complaint_lines, summary]))
        return EXIT_OPEN if complaint_lines else 0
    print("NOT AUDITED: no source of advisories could be read", file=sys.stderr)
    return EXIT_NOT_ASKED


if __name__ == "__main__":
    sys.exit(main())
