"""Formats shared by several releases: the version that this release writes of each, and those that it reads. Pure.

`docs/reference/formats.md` says which programs write and read each, and what happens to an unreadable version.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from cache.errors import UnknownFormat

THIS_RELEASE: Final = "0.2.0.dev0"
"""Name of this release, as in pyproject.toml; heartbeats and refusals contain it."""

FORMAT_FIELD: Final = "format"
"""Field with the version. A document without it has version 1: release 0.1.0 wrote no version, and refuses unknown
fields."""


class Format(NamedTuple):
    """Format: its name, the version written, the oldest and newest version read, and whether the service reads it.

    Support window: `oldest_readable_version` is at most the version that the preceding release wrote.
    """

    name: str
    written_version: int = 1
    oldest_readable_version: int = 1
    newest_readable_version: int = 1
    is_read_by_service: bool = False

    @property
    def readable_versions_text(self) -> str:
        """Versions that are read, as text."""
        return (
            str(self.newest_readable_version)
            if self.oldest_readable_version == self.newest_readable_version
            else f"{self.oldest_readable_version} to {self.newest_readable_version}"
        )


KEYS: Final = "Redis keys"
MANIFEST: Final = "manifest"
RECORD: Final = "record"
POINTER: Final = "pointer"
STAGING_NOTE: Final = "staging note"
RELEASE_RECORD: Final = "release record"
BLOCKLIST: Final = "blocklist"
EXPERIMENTS: Final = "experiments"
REGISTRY_ROW: Final = "registry row"
HEARTBEAT: Final = "heartbeat"
ERASURE: Final = "erasure"
BUNDLE: Final = "bundle"
STAGES: Final = "stages of a night"

FORMATS: Final[dict[str, Format]] = {
    format_.name: format_
    for format_ in (
        Format(KEYS, is_read_by_service=True),
        # Also the version of all files that the manifest lists. Written: 5 if events are accepted, 4 if filters are
        # declared, 3 if items have attributes, 2 if a model has a second file of weights, else 1.
        Format(MANIFEST, newest_readable_version=5, is_read_by_service=True),
        Format(RECORD, is_read_by_service=True),
        Format(POINTER, is_read_by_service=True),
        Format(STAGING_NOTE, is_read_by_service=True),
        Format(RELEASE_RECORD, is_read_by_service=True),
        Format(BLOCKLIST, is_read_by_service=True),
        Format(EXPERIMENTS, is_read_by_service=True),
        Format(REGISTRY_ROW),
        Format(HEARTBEAT),
        Format(ERASURE),
        Format(BUNDLE),
        Format(STAGES),
    )
}
"""Every versioned format by name."""

FIRST_RELEASE: Final = "0.1.0"
"""Release whose heartbeats list no formats; it reads version 1 of each."""


def served_formats() -> dict[str, tuple[int, int]]:
    """Return the oldest and newest version that a service of this release reads, by format, for its heartbeat."""
    return {
        format_.name: (format_.oldest_readable_version, format_.newest_readable_version)
        for format_ in FORMATS.values()
        if format_.is_read_by_service
    }


def version_stamp(format_name: str) -> dict[str, int]:
    """Return the version field of a document; empty for version 1, see FORMAT_FIELD."""
    written = FORMATS[format_name].written_version
    return {} if written == 1 else {FORMAT_FIELD: written}


def version_of(document: Mapping[str, object]) -> object:
    """Return the version in a document, 1 if it has none."""
    return document.get(FORMAT_FIELD, 1)


def unreadable_reason(format_name: str, version: object, document_name: str = "") -> str | None:
    """Explain in one line, with the remedy, why this release does not read a version; None if it does."""
    format_ = FORMATS[format_name]
    if type(version) is int and format_.oldest_readable_version <= version <= format_.newest_readable_version:
        return None
    remedy = (
        "it was written by a release older than the preceding one: run the preceding release first"
        if type(version) is int and version < format_.oldest_readable_version
        else "it was written by a newer release: upgrade this program first"
    )
    document_words = document_name or f"the {format_name}"
    return (
        f"{document_words} has {format_name} format {version}, this release ({THIS_RELEASE}) reads "
        f"{format_.readable_versions_text}; {remedy}"
    )


def demand_readable(format_name: str, version: object, document_name: str = "") -> None:
    """Raise UnknownFormat for a version that this release does not read; `document_name` is the document, in words."""
    if (reason := unreadable_reason(format_name, version, document_name)) is not None:
        raise UnknownFormat(reason, format=format_name, version=version)
