"""Split of the requests between canary and live: a stable hash of the caller's key, equal on all replicas. Pure."""

from dataclasses import dataclass

import xxhash

_WHOLE = 2**64


@dataclass(frozen=True, slots=True)
class Split:
    """Share of `percent` of all keys, drawn anew for every canary generation: no caller is always in the canary."""

    seed: int
    limit: int

    @classmethod
    def of(cls, generation: str, percent: float) -> "Split":
        """The split of one canary; its seed is the 64-bit xxh3 (seed 0) of the canary generation's id."""
        return cls(xxhash.xxh3_64_intdigest(generation.encode()), round(_WHOLE * (percent / 100.0)))

    def takes(self, key: bytes) -> bool:
        """Returns whether a request with this key goes to the canary. A larger percentage keeps all it had."""
        return xxhash.xxh3_64_intdigest(key, self.seed) < self.limit
