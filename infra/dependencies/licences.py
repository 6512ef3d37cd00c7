"""Check of the licences of pinned dependencies, with pip-licenses: `python -m infra.dependencies.licences`.

`--write` writes `docs/reference/licences.md`, which lists the packages of the service. pip-licenses reads the licences
of installed packages; those of packages for other platforms are in `allowed.toml`. An exception there applies to one
package and needs a reason; packages of the service cannot have one.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from infra.dependencies.locks import Pin, read_lock

ROOT = Path(__file__).parents[2]
PIP_LICENSES_PATH = ROOT / ".venv-audit/bin/pip-licenses"
RULES_FILE = Path(__file__).with_name("allowed.toml")
PAGE_PATH = ROOT / "docs/reference/licences.md"
SHIPPED_LOCK = "serving"
JUDGED_LOCKS = (SHIPPED_LOCK, "airflow", "all")
PAGE_HEAD = """# Licences

The packages of `infra/locks/serving.txt`, which the image of the service contains in addition to Larder's own code
(Apache-2.0), Python and Debian. Made by `python -m infra.dependencies.licences --write` from the packages' metadata, as
pip-licenses reads it; `make licences` checks this page. The versions are in the lock; the texts are in each package's
`*.dist-info`. Wheels may contain compiled third-party libraries, which the wheels' licence files name.

| package | licence |
|---|---|
"""


def read_installed_licences() -> dict[str, tuple[str, str]]:
    """Return version and licence of each installed package, by name."""
    command = [str(PIP_LICENSES_PATH), "--python", sys.executable, "--with-system", "--format", "json"]
    package_rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {canonicalize_name(row["Name"]): (row["Version"], row["License"]) for row in package_rows}


def judge_licences(
    pins_by_lock: Mapping[str, Sequence[Pin]],
    version_and_licence_by_name: Mapping[str, tuple[str, str]],
    licence_rules: Mapping[str, Any],
) -> tuple[dict[str, str], list[str]]:
    """Return the licence of each pinned package by name, and the problems found."""
    licence_by_name: dict[str, str] = {}
    complaints: list[str] = []
    for pin in sorted({pin for pins in pins_by_lock.values() for pin in pins}, key=str):
        version, licence = version_and_licence_by_name.get(pin.distribution_name, ("", ""))
        if not pin.is_for_this_machine():
            licence_by_name.setdefault(
                pin.distribution_name, licence_rules["elsewhere"].get(pin.distribution_name, licence or "UNKNOWN")
            )
        elif version != pin.pinned_version:
            complaints.append(f"{pin.distribution_name}: {version or 'nothing'} is installed, not {pin.pinned_version}")
        else:
            licence_by_name[pin.distribution_name] = licence
    shipped_names = {pin.distribution_name for pin in pins_by_lock.get(SHIPPED_LOCK, ())}
    for name, licence in licence_by_name.items():
        exception = licence_rules["exceptions"].get(name)
        if exception is None:
            if not set(licence.split("; ")) <= set(licence_rules["allowed"]):
                complaints.append(f"{name}: {licence}, not allowed")
        elif not exception["reason"] or exception["licence"] != licence:
            complaints.append(f"{name}: has {licence}, but the exception is for {exception['licence']}")
        elif name in shipped_names:
            complaints.append(f"{name}: has an exception, but is part of the service")
    obsolete_names = licence_rules["exceptions"].keys() - licence_by_name.keys()
    complaints += [f"{name}: has an exception, but is in no lock" for name in sorted(obsolete_names)]
    return licence_by_name, complaints


def main(arguments: list[str]) -> int:
    """Check all licences, and check or write the page of the service's packages; return 0, or 1 with problems."""
    pins_by_lock = {name: read_lock(name) for name in JUDGED_LOCKS}
    licence_by_name, complaints = judge_licences(
        pins_by_lock, read_installed_licences(), tomllib.loads(RULES_FILE.read_text())
    )
    names = sorted({pin.distribution_name for pin in pins_by_lock[SHIPPED_LOCK]})
    page_text = PAGE_HEAD + "".join(f"| {name} | {licence_by_name.get(name)} |\n" for name in names)
    if arguments == ["--write"]:
        PAGE_PATH.write_text(page_text)
    elif PAGE_PATH.read_text() != page_text:
        complaints.append(f"{PAGE_PATH.name} is out of date: run with --write")
    for complaint in complaints:
        print(f"refused: {complaint}", file=sys.stderr)
    print(f"{len(licence_by_name)} packages, {len(complaints)} refused")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
