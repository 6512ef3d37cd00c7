"""Time limits of gates: some time in any case, and the reading of all bytes at the governor's floor. Pure."""

from dataclasses import dataclass
from typing import Final, Self

from cache.config.gates import GateThresholds
from cache.config.sections import GovernorConfig

MIB: Final = 1 << 20
PASSES: Final = 3
"""Passes over all bytes: files against their checksums, records one by one, pages in Redis."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds that one gate, and that all of them, may take."""

    gate_s: float
    total_s: float

    @classmethod
    def of(cls, thresholds: GateThresholds, governor: GovernorConfig, size_bytes: int) -> Self:
        """Limits for a generation of `size_bytes`, which no gate needs to read faster than the governor promises."""
        reading_s = size_bytes / (governor.floor_mib_s * MIB)
        return cls(
            thresholds.timeout_s + reading_s, thresholds.total_timeout_s + PASSES * reading_s
        )
