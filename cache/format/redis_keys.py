"""Keys in Redis, by namespace. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from cache.formats import FORMATS, KEYS

KEYSPACE_VERSION: Final = FORMATS[KEYS].written_version
"""Version of all keys in Redis; releases with another version do not read these keys."""

NAME_PATTERN: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
"""Pattern for names of namespaces, tables and filters: valid in keys and folder names."""


def hash_hex(hash_or_digest: int | bytes) -> str:
    """Return the end of an overlay key: 16 hex digits for an entity hash, 32 for the digest of an input without id."""
    return hash_or_digest.hex() if isinstance(hash_or_digest, bytes) else f"{hash_or_digest:016x}"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Redis keys of one namespace. In Redis Cluster the control keys share a slot; pages and overlays are spread."""

    namespace: str

    @property
    def live(self) -> str:
        """Key of the pointer to the live generation."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:live"

    @property
    def staging_note(self) -> str:
        """Key of the staging note, which names the generation that replicas should prepare."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:next"

    @property
    def generations(self) -> str:
        """Key of the registry, a hash: generation id -> state."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:generations"

    @property
    def replicas(self) -> str:
        """Key of the sorted set of replicas' heartbeats, scored by time."""
        return self.replicas_of(KEYSPACE_VERSION)

    def replicas_of(self, keys_version: int) -> str:
        """Return the key of replicas' heartbeats under another version of the keys."""
        return f"larder:{keys_version}:{{{self.namespace}}}:replicas"

    def hot_names(self, hour_number: int) -> str:
        """Return the key of a sorted set for one hour (since 1970, Redis' clock): table and id, scored by requests."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:hot:{hour_number}"

    def dashboard_bin(self, bin_start_s: int) -> str:
        """Return the key of a dashboard hash: worker -> its counts in the interval from `bin_start_s` (Unix time)."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:{bin_start_s}"

    @property
    def dashboard_workers(self) -> str:
        """Key of a hash for the dashboard: worker -> its counts since its start, and its state."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:workers"

    def cold_names(self, day_number: int) -> str:
        """Return the key of a sorted set for one day: table and id, unknown to the generation, scored by requests."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:cold:{day_number}"

    def read_entities(self, generation: str, table: str) -> str:
        """Return the key of a HyperLogLog of a table's entities that were read at least once."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:read:{generation}:{table}"

    @property
    def quality_figures(self) -> str:
        """Key of a hash: replica -> measured quality of its answers, as JSON."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:quality"

    @property
    def channel(self) -> str:
        """Key of the pub/sub channel that announces changes before the next poll."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:changes"

    @property
    def events(self) -> str:
        """Key of the stream of accepted events."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:events"

    @property
    def inbox(self) -> str:
        """Key of the stream to which producers may write events; the service accepts events from it."""
        return f"{self.events}:inbox"

    @property
    def rejected_events(self) -> str:
        """Key of the stream of rejected events, with reasons."""
        return f"{self.events}:rejected"

    @property
    def event_ids(self) -> bytes:
        """Prefix of the keys of accepted events' ids; 16 bytes of a digest follow."""
        return f"{self.events}:id:".encode()

    @property
    def event_sources(self) -> bytes:
        """Prefix of the keys of event counts by user; 16 bytes of a digest follow."""
        return f"{self.events}:of:".encode()

    def page(self, generation: str, table: str, page_number: int) -> str:
        """Return the key of one page of a table."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:{page_number}"

    def pages(self, generation: str, table: str) -> bytes:
        """Return the prefix of the keys of a table's pages; the page number follows."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:".encode()

    def loaded_parts(self, generation: str) -> str:
        """Return the key of a hash: "table/part" -> digest of the pages that are completely in Redis."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:loaded"

    def overlay(self, generation: str, table: str, hash_hex: str) -> str:
        """Return the key of one record that live inference stored."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:w:{generation}:{table}:{hash_hex}"

    def lease(self, generation: str, table: str, hash_hex: str, input_digest: bytes) -> str:
        """Return the key of the lease for computing one overlay; has the same prefix as the overlay's key, for ACLs."""
        return f"{self.overlay(generation, table, hash_hex)}:{input_digest.hex()}"
