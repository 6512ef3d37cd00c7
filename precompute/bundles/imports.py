"""Imports of a folder: its report has the bundle, the time and the source file of each, for `status` to tell."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from cache.errors import ConfigError
from cache.process.command_line import json_text
from cache.store.artefacts import write_atomically

REPORT: Final = "import.json"

IMPORTS_KEPT: Final = 50
"""Imports that a report lists, the last ones."""


def write_import(
    folder: Path, report: Mapping[str, Any], bundle_digest: str, source: str = ""
) -> None:
    """Write the report of an import beside its bundle; `source`: the model's file, empty if it came from Python."""
    imported_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    entry = {"bundle_digest": bundle_digest, "imported_at": imported_at, "source": source}
    imports = [*_imports(folder), entry][-IMPORTS_KEPT:]
    write_atomically(folder / REPORT, json_text({**report, "imports": imports}).encode())


def note_import_begun(folder: Path) -> None:
    """Mark a folder whose bundle and tables an import is about to replace; its report, written last, ends that.

    The labels and columns of the import before it stay: whoever repeats this one is told of them.
    """
    report = {**read_report(folder), "unfinished": True, "imports": _imports(folder)}
    write_atomically(folder / REPORT, json_text(report).encode())


def demand_finished_import(bundle_folder: Path) -> None:
    """Raise ConfigError if an import into the folder around a bundle was killed between bundle and tables."""
    if read_report(bundle_folder.parent).get("unfinished"):
        raise ConfigError(
            f"the import into {bundle_folder.parent} was interrupted, or is not over, so that bundle and tables may "
            "not belong together: run it again"
        )


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report of a folder's last import; empty without one, or with one that cannot be read."""
    try:
        report = orjson.loads((folder / REPORT).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return report if isinstance(report, dict) else {}


def find_import(folder: Path, bundle_digest: str) -> Mapping[str, str]:
    """Return `imported_at` and `source` of the last import that made a bundle; empty if none did."""
    entries = (
        entry for entry in reversed(_imports(folder)) if entry.get("bundle_digest") == bundle_digest
    )
    return next(entries, {})


def _imports(folder: Path) -> list[dict[str, str]]:
    imports = read_report(folder).get("imports", [])
    return [entry for entry in imports if isinstance(entry, dict)]
