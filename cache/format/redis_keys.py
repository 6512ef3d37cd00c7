"""Keys in Redis, by namespace. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from cache.formats import FORMATS, KEYS

KEYSPACE_VERSION: Final = FORMATS[KEYS].written
"""Version of all keys in Redis; a release with another version ignores these keys."""

NAME_PATTERN: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
"""Name of a namespace, a table or a filter: fit for keys and folder names alike."""


def hash_hex(key: int | bytes) -> str:
    """The overlay key's last part: 16 hex digits for an entity hash, 32 for an id-less feature key."""
    return key.hex() if isinstance(key, bytes) else f"{key:016x}"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Redis keys of one namespace; control keys share a slot in Redis Cluster, pages and overlays spread."""

    namespace: str

    @property
    def live(self) -> str:
        """Key of the pointer to the live generation."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:live"

    @property
    def next(self) -> str:
        """Key of the staging note, which names the generation that replicas are to hold ready."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:next"

    @property
    def generations(self) -> str:
        """Key of the registry, a hash: generation id -> state."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:generations"

    @property
    def replicas(self) -> str:
        """Key of the sorted set of serving replicas, by time of heartbeat."""
        return self.replicas_of(KEYSPACE_VERSION)

    def replicas_of(self, version: int) -> str:
        """Return the key of the replicas under another version of the keys."""
        return f"larder:{version}:{{{self.namespace}}}:replicas"

    def hot_names(self, hour: int) -> str:
        """Return the key of a sorted set: table and id, by requests in one hour (since 1970, Redis' clock)."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:hot:{hour}"

    def bin(self, start_s: int) -> str:
        """Return the key of a hash for the dashboard: worker -> its counts in the seconds from `start_s` (Unix) on."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:{start_s}"

    @property
    def workers(self) -> str:
        """Key of a hash for the dashboard: worker -> its counts since the start, and its state."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:workers"

    def cold_names(self, day: int) -> str:
        """Return the key of a sorted set: table and id, by requests in one day, of ids not in the live generation."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:cold:{day}"

    def read(self, generation: str, table: str) -> str:
        """Return the key of a HyperLogLog of a table's entities that were read at least once."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:read:{generation}:{table}"

    @property
    def quality(self) -> str:
        """Key of a hash: replica -> its measured quality of answers, as JSON."""
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
        """Key of the stream that producers may write events to, and from which the service accepts them."""
        return f"{self.events}:inbox"

    @property
    def rejected_events(self) -> str:
        """Key of the stream of rejected entries, with reasons."""
        return f"{self.events}:rejected"

    @property
    def event_ids(self) -> bytes:
        """Key prefix of the ids of accepted events; 16 bytes of a digest follow."""
        return f"{self.events}:id:".encode()

    @property
    def event_sources(self) -> bytes:
        """Key prefix of the counts of events by user; 16 bytes of a digest follow."""
        return f"{self.events}:of:".encode()

    def page(self, generation: str, table: str, page_number: int) -> str:
        """Key of one page of a table."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:{page_number}"

    def pages(self, generation: str, table: str) -> bytes:
        """Return the key prefix of all pages of a table; the page number follows."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:".encode()

    def loaded(self, generation: str) -> str:
        """Return the key of a hash: "table/part" -> digest of the pages that are wholly in Redis."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:loaded"

    def overlay(self, generation: str, table: str, hash_hex: str) -> str:
        """Return the key of one record written through by live inference."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:w:{generation}:{table}:{hash_hex}"

    def lease(self, generation: str, table: str, hash_hex: str, digest: bytes) -> str:
        """Return the key of the lease on computing one input's overlay; starts like the overlay's key, for ACLs."""
        return f"{self.overlay(generation, table, hash_hex)}:{digest.hex()}"
