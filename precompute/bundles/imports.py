"""Imports into a folder: its report lists the bundle, time and source file of each, for `status`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from cache.errors import ConfigError
from cache.process.command_line import json_text
from cache.store.artefacts import write_atomically

IMPORT_REPORT_FILE: Final = "import.json"

LISTED_IMPORTS_MAX: Final = 50
"""Maximum number of imports that a report lists, the newest ones."""


def write_import_report(
    import_folder: Path, report: Mapping[str, Any], bundle_digest: str, source_path: str = ""
) -> None:
    """Write the report of an import into its folder; `source_path` is the model's file, empty for a Python object."""
    imported_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    import_entry = {"bundle_digest": bundle_digest, "imported_at": imported_at, "source": source_path}
    import_entries = [*_listed_imports(import_folder), import_entry][-LISTED_IMPORTS_MAX:]
    write_atomically(import_folder / IMPORT_REPORT_FILE, json_text({**report, "imports": import_entries}).encode())


def note_import_begun(import_folder: Path) -> None:
    """Mark a folder as unfinished before an import replaces its bundle and tables; the final report removes the mark.

    The labels and columns of the previous import stay in the report, so that a repeated import still compares with
    them.
    """
    report = {**read_import_report(import_folder), "unfinished": True, "imports": _listed_imports(import_folder)}
    write_atomically(import_folder / IMPORT_REPORT_FILE, json_text(report).encode())


def demand_finished_import(bundle_folder: Path) -> None:
    """Raise ConfigError if an import into the folder around a bundle has not finished."""
    if read_import_report(bundle_folder.parent).get("unfinished"):
        raise ConfigError(
            f"the import into {bundle_folder.parent} was interrupted or is still running, so bundle and tables may not "
            "belong together: run it again"
        )


def read_import_report(import_folder: Path) -> dict[str, Any]:
    """Return the report of a folder's last import; empty without one, or with one that cannot be read."""
    try:
        report = orjson.loads((import_folder / IMPORT_REPORT_FILE).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return report if isinstance(report, dict) else {}


def find_import(import_folder: Path, bundle_digest: str) -> Mapping[str, str]:
    """Return `imported_at` and `source` of the last import that made this bundle; empty if no import did."""
    matching_entries = (
        import_entry
        for import_entry in reversed(_listed_imports(import_folder))
        if import_entry.get("bundle_digest") == bundle_digest
    )
    return next(matching_entries, {})


def _listed_imports(import_folder: Path) -> list[dict[str, str]]:
    import_entries = read_import_report(import_folder).get("imports", [])
    return [import_entry for import_entry in import_entries if isinstance(import_entry, dict)]
