"""Entities that are read at all: told to Redis' HyperLogLogs in batches, counted there over all replicas.

Who is read has been read from Redis once per process and generation (or ahead of requests, which the sketch of recent
requests tells), so hits of L1 add nothing and cost nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

KEYS_MAX = 1 << 16
"""Hashes kept between two reports; what comes after them is left out and counted."""

AT_ONCE = 512
"""Hashes in one PFADD: some 0.2 ms of Redis, which readers wait for."""

LIFE_S = 3 * 86_400
"""Seconds that the counts live, from the last report on."""

HashBatches = Sequence[Sequence[int | bytes]]
"""Hashes as they were added."""


class ReadHashes:
    """Hashes of entities by generation and table."""

    def __init__(self) -> None:
        self.left_out = 0
        self._keys: defaultdict[tuple[str, str], list[Sequence[int | bytes]]] = defaultdict(list)
        self._room = KEYS_MAX

    def add(self, generation: str, table: str, keys: Sequence[int | bytes]) -> None:
        """Adds the hashes of entities that were read; counts them as left out if there is no room."""
        if len(keys) > self._room:
            self.left_out += len(keys)
            return
        self._room -= len(keys)
        self._keys[generation, table].append(keys)

    def drain(self, generation: str) -> Mapping[str, HashBatches]:
        """Hashes by table of what was read of this generation since the last call; those of others are forgotten."""
        keys_by_table = {
            table: keys for (of, table), keys in self._keys.items() if of == generation
        }
        self._keys.clear()
        self._room = KEYS_MAX
        return keys_by_table


def packed(added: HashBatches) -> list[bytes]:
    """Hashes as bytes, each once; digests of inputs left out. 20 ms for all that is kept: not for the event loop."""
    keys = set(chain.from_iterable(added))
    return [
        entity_hash.to_bytes(8, "little") for entity_hash in keys if isinstance(entity_hash, int)
    ]


def pieces(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Batches of the hashes that travel at once."""
    return [keys[at : at + AT_ONCE] for at in range(0, len(keys), AT_ONCE)]
