"""Formats that the replicas read: looked at before anything that they could not follow is begun or moved."""

from collections.abc import Mapping

from cache.errors import Refused
from cache.formats import FORMATS, KEYS, POINTER, RELEASE, RELEASE_RECORD, STAGING_NOTE
from precompute.control.control_keys import Control
from precompute.control.rows import Replica

FIRST = (1, 1)
"""Versions that a replica reads of a format that its heartbeat does not tell of."""

MOVES = (POINTER, RELEASE_RECORD, STAGING_NOTE)
"""Formats that a move of the pointer writes, whatever it moves to."""


def written() -> dict[str, int]:
    """Versions that this release's night writes of what replicas read, by format."""
    return {
        format_spec.name: format_spec.written
        for format_spec in FORMATS.values()
        if format_spec.is_served
    }


def demand_readers(
    control: Control, version_by_format: Mapping[str, int], writer_clause: str
) -> None:
    """Raises Refused, naming a live replica that cannot read one of the versions; `writer_clause` lists them."""
    for replica in (*control.replicas(), *_under_older_keys(control)):
        for name, version in version_by_format.items():
            oldest, newest_version = replica.reads.get(name, FIRST)
            if not oldest <= version <= newest_version:
                reads = (
                    str(newest_version)
                    if oldest == newest_version
                    else f"{oldest} to {newest_version}"
                )
                remedy = (
                    "upgrade the services first, or stop this one"
                    if version > newest_version
                    else f"run a night with Larder {replica.release}, or stop this one"
                )
                raise Refused(
                    f"replica {replica.name} (Larder {replica.release}) reads {name} format {reads}, {writer_clause} "
                    f"{version}: "
                    f"nothing was moved; {remedy}",
                    rule="formats", value=reads, threshold=version, replica=replica.name, format=name,
                )  # fmt: skip


def demand_readers_of_night(control: Control) -> None:
    """Raises Refused unless every replica that beats reads what this release's night writes."""
    demand_readers(control, written(), f"a night of this release ({RELEASE}) writes")


def _under_older_keys(control: Control) -> list[Replica]:
    """Replicas that beat under keys of an older version within the window: this release's pointer is none to them."""
    found: list[Replica] = []
    now_s = control.time()
    for version in range(FORMATS[KEYS].oldest_readable, FORMATS[KEYS].written):
        found += control.replicas_under(control.keys.replicas_of(version), now_s)
    return found
