"""Split of requests by a salted hash of the caller's key, equal on all replicas: canaries and experiments. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from cache.control.allotment import BUCKETS, Ranges

_HASH_SPACE = 2**64


def seed_of(salt: str) -> int:
    """Seed of a split: the 64-bit xxh3 (seed 0) of its salt."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def drawn(key: bytes, seed: int) -> int:
    """The key's place among all keys, uniform in 0 to 2**64 - 1, for splits of this seed."""
    return xxhash.xxh3_64_intdigest(key, seed)


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Share of `percent` of all keys, drawn anew for every canary generation: no caller is always in the canary."""

    seed: int
    limit: int

    @classmethod
    def of(cls, salt: str, percent: float) -> "KeySplit":
        """The split of one salt; a canary's is the id of its generation."""
        return cls(seed_of(salt), round(_HASH_SPACE * (percent / 100.0)))

    def has_key(self, key: bytes) -> bool:
        """Returns whether the share has this key. A larger percentage keeps all it had."""
        return drawn(key, self.seed) < self.limit


class Owners:
    """Owner of each of `BUCKETS` buckets of keys, or None where a bucket is nobody's."""

    __slots__ = ("_names", "_owners", "_seed")

    def __init__(self, salt: str, ranges_by_name: Mapping[str, Ranges]) -> None:
        self._seed = seed_of(salt)
        self._names = (None, *ranges_by_name)
        self._owners = bytearray(BUCKETS)
        for number, ranges in enumerate(ranges_by_name.values(), 1):
            for start, stop in ranges:
                self._owners[start:stop] = bytes([number]) * (stop - start)

    def of(self, key: bytes) -> str | None:
        """Name of whoever has the key's bucket."""
        return self._names[self._owners[drawn(key, self._seed) * BUCKETS // _HASH_SPACE]]
