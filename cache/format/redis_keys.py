"""Keys in Redis, by namespace. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from cache.formats import FORMATS, KEYS

KEYSPACE_VERSION: Final = FORMATS[KEYS].written
"""Version of all keys in Redis: with another one, everything there is somebody else's."""

NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
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
        """The generation that replicas are asked to hold ready."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:next"

    @property
    def generations(self) -> str:
        """Hash: generation id -> state."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:generations"

    @property
    def replicas(self) -> str:
        """Sorted set of serving replicas by heartbeat."""
        return self.replicas_of(KEYSPACE_VERSION)

    def replicas_of(self, version: int) -> str:
        """The same under another version of the keys."""
        return f"larder:{version}:{{{self.namespace}}}:replicas"

    def hot_names(self, hour: int) -> str:
        """Sorted set of table and id by how often it was asked for in one hour (since 1970, Redis' clock)."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:hot:{hour}"

    def bin(self, start: int) -> str:
        """Hash: worker -> what it counted in the seconds from `start` (Unix) on; for the dashboard."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:{start}"

    @property
    def workers(self) -> str:
        """Hash: worker -> what it counted in all, and how it stands; for the dashboard."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:dash:workers"

    def cold_names(self, day: int) -> str:
        """Sorted set of table and id, by requests in one day, of ids that the live generation did not know."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:cold:{day}"

    def read(self, generation: str, table: str) -> str:
        """HyperLogLog of the entities of a table that were read at least once."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:read:{generation}:{table}"

    @property
    def quality(self) -> str:
        """Hash: replica -> what it found of the quality of its answers, as JSON."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:quality"

    @property
    def channel(self) -> str:
        """Pub/sub channel that shortens what polling would find anyway."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:changes"

    @property
    def events(self) -> str:
        """Stream of the events that were accepted."""
        return f"larder:{KEYSPACE_VERSION}:{{{self.namespace}}}:events"

    @property
    def inbox(self) -> str:
        """Stream that producers may write events to, from where the service takes them."""
        return f"{self.events}:inbox"

    @property
    def rejected_events(self) -> str:
        """Stream of what was no event, with why."""
        return f"{self.events}:rejected"

    @property
    def event_ids(self) -> bytes:
        """Key prefix of the ids of accepted events, before 16 bytes of a digest."""
        return f"{self.events}:id:".encode()

    @property
    def event_sources(self) -> bytes:
        """Key prefix of how many events a user sent, before 16 bytes of a digest."""
        return f"{self.events}:of:".encode()

    def page(self, generation: str, table: str, page: int) -> str:
        """Key of one page of a table."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:{page}"

    def pages(self, generation: str, table: str) -> bytes:
        """Key prefix of all pages of a table, before the page number."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:{table}:".encode()

    def loaded(self, generation: str) -> str:
        """Hash: "table/part" -> digest of the pages that are wholly in Redis."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:g:{generation}:loaded"

    def overlay(self, generation: str, table: str, hash_hex: str) -> str:
        """Key of one record written through by live inference."""
        return f"larder:{KEYSPACE_VERSION}:{self.namespace}:w:{generation}:{table}:{hash_hex}"

    def lease(self, generation: str, table: str, hash_hex: str, digest: bytes) -> str:
        """Lease on computing the overlay for one input: beside the overlay, under the same rights."""
        return f"{self.overlay(generation, table, hash_hex)}:{digest.hex()}"
