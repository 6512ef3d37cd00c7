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

from infra.dependencies.locks import Pin, lock

ROOT = Path(__file__).parents[2]
TOOL = ROOT / ".venv-audit/bin/pip-licenses"
ALLOWED = Path(__file__).with_name("allowed.toml")
PAGE = ROOT / "docs/reference/licences.md"
SHIPPED = "serving"
LOCKS = (SHIPPED, "airflow", "all")
HEAD = """# Licences

What `infra/locks/serving.txt` brings along: what the image of the service ships beside Larder's own code (Apache-2.0),
Python and Debian. Made by `python -m infra.dependencies.licences --write` from what pip-licenses reads of the packages'
own metadata; `make licences` holds that it is true. The versions stand in the lock; the texts lie in each package's
`*.dist-info`. Wheels may hold compiled libraries of others, which their own licence files name.

| package | licence |
|---|---|
"""


def installed() -> dict[str, tuple[str, str]]:
    """Return version and licence of each package of this environment, by name."""
    command = [str(TOOL), "--python", sys.executable, "--with-system", "--format", "json"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {canonicalize_name(row["Name"]): (row["Version"], row["License"]) for row in rows}


def judge(
    pins_by_lock: Mapping[str, Sequence[Pin]],
    packages: Mapping[str, tuple[str, str]],
    rules: Mapping[str, Any],
) -> tuple[dict[str, str], list[str]]:
    """Return the licence of each pinned package, and complaints."""
    licences: dict[str, str] = {}
    complaints: list[str] = []
    for pin in sorted({pin for pins in pins_by_lock.values() for pin in pins}, key=str):
        version, licence = packages.get(pin.name, ("", ""))
        if not pin.is_for_this_machine():
            licences.setdefault(pin.name, rules["elsewhere"].get(pin.name, licence or "UNKNOWN"))
        elif version != pin.version:
            complaints.append(f"{pin.name}: {version or 'nothing'} is installed, not {pin.version}")
        else:
            licences[pin.name] = licence
    shipped = {pin.name for pin in pins_by_lock.get(SHIPPED, ())}
    for name, licence in licences.items():
        exception = rules["exceptions"].get(name)
        if exception is None:
            if not set(licence.split("; ")) <= set(rules["allowed"]):
                complaints.append(f"{name}: {licence}, not allowed")
        elif not exception["reason"] or exception["licence"] != licence:
            complaints.append(f"{name}: {licence}, excepted as {exception['licence']}")
        elif name in shipped:
            complaints.append(f"{name}: excepted, and shipped with the service")
    obsolete = rules["exceptions"].keys() - licences.keys()
    complaints += [f"{name}: an exception for what no lock has" for name in sorted(obsolete)]
    return licences, complaints


def main(arguments: list[str]) -> int:
    """Judge all licences and the page of those shipped, print complaints, and exit with the result."""
    pins_by_lock = {name: lock(name) for name in LOCKS}
    licences, complaints = judge(pins_by_lock, installed(), tomllib.loads(ALLOWED.read_text()))
    names = sorted({pin.name for pin in pins_by_lock[SHIPPED]})
    page = HEAD + "".join(f"| {name} | {licences.get(name)} |\n" for name in names)
    if arguments == ["--write"]:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        complaints.append(f"{PAGE.name} is not what --write makes of the lock")
    for complaint in complaints:
        print(f"refused: {complaint}", file=sys.stderr)
    print(f"{len(licences)} packages, {len(complaints)} refused")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
