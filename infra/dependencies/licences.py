"""Licences of the locks' pins, as pip-licenses reads them: `python -m infra.dependencies.licences`.

`--write` writes `docs/reference/licences.md`, the page of the packages that an installation of the service contains.
pip-licenses knows what is installed here. The rest is of the locks: all that they pin is judged, packages of other
machines by `allowed.toml`, and an exception is of one package, with a reason, and never of one that the service ships.
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

What `infra/locks/serving.txt` brings along: what the image of the service ships beside Larder's own code (Apache-2.0),
Python and Debian. Made by `python -m infra.dependencies.licences --write` from what pip-licenses reads of the packages'
own metadata; `make licences` holds that it is true. The versions stand in the lock; the texts lie in each package's
`*.dist-info`. Wheels may hold compiled libraries of others, which their own licence files name.

| package | licence |
|---|---|
"""


def read_installed_licences() -> dict[str, tuple[str, str]]:
    """Return version and licence of each package of this environment, by name."""
    command = [str(PIP_LICENSES_PATH), "--python", sys.executable, "--with-system", "--format", "json"]
    package_rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {canonicalize_name(row["Name"]): (row["Version"], row["License"]) for row in package_rows}


def judge_licences(
    pins_by_lock: Mapping[str, Sequence[Pin]],
    version_and_licence_by_name: Mapping[str, tuple[str, str]],
    licence_rules: Mapping[str, Any],
) -> tuple[dict[str, str], list[str]]:
    """Return the licence of each pinned package, and complaints."""
    licence_by_name: dict[str, str] = {}
    complaints: list[str] = []
    for pin in sorted({pin for pins in pins_by_lock.values() for pin in pins}, key=str):
        version, licence = version_and_licence_by_name.get(pin.name, ("", ""))
        if not pin.is_for_this_machine():
            licence_by_name.setdefault(pin.name, licence_rules["elsewhere"].get(pin.name, licence or "UNKNOWN"))
        elif version != pin.version:
            complaints.append(f"{pin.name}: {version or 'nothing'} is installed, not {pin.version}")
        else:
            licence_by_name[pin.name] = licence
    shipped_names = {pin.name for pin in pins_by_lock.get(SHIPPED_LOCK, ())}
    for name, licence in licence_by_name.items():
        exception = licence_rules["exceptions"].get(name)
        if exception is None:
            if not set(licence.split("; ")) <= set(licence_rules["allowed"]):
                complaints.append(f"{name}: {licence}, not allowed")
        elif not exception["reason"] or exception["licence"] != licence:
            complaints.append(f"{name}: {licence}, excepted as {exception['licence']}")
        elif name in shipped_names:
            complaints.append(f"{name}: excepted, and shipped with the service")
    obsolete_names = licence_rules["exceptions"].keys() - licence_by_name.keys()
    complaints += [f"{name}: an exception for what no lock has" for name in sorted(obsolete_names)]
    return licence_by_name, complaints


def main(arguments: list[str]) -> int:
    """Judge all licences and the page of those shipped, print complaints, and exit with the result."""
    pins_by_lock = {name: read_lock(name) for name in JUDGED_LOCKS}
    licence_by_name, complaints = judge_licences(
        pins_by_lock, read_installed_licences(), tomllib.loads(RULES_FILE.read_text())
    )
    names = sorted({pin.name for pin in pins_by_lock[SHIPPED_LOCK]})
    page_text = PAGE_HEAD + "".join(f"| {name} | {licence_by_name.get(name)} |\n" for name in names)
    if arguments == ["--write"]:
        PAGE_PATH.write_text(page_text)
    elif PAGE_PATH.read_text() != page_text:
        complaints.append(f"{PAGE_PATH.name} is not what --write makes of the lock")
    for complaint in complaints:
        print(f"refused: {complaint}", file=sys.stderr)
    print(f"{len(licence_by_name)} packages, {len(complaints)} refused")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
