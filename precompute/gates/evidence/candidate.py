"""A candidate: a loaded generation with all that its gates may look at."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from precompute.builds.build import Build
from precompute.config.settings import GateThresholds, GovernorConfig
from precompute.control.control_keys import Control
from precompute.erasures.erasure import NO_ERASURES, ErasedEntities
from precompute.experiments.room import ArmRoom
from precompute.gates.evidence.evidence import Evidence
from precompute.gates.evidence.verdict import FIRST, UNREADABLE, Measurement


@dataclass(frozen=True, eq=False)
class Candidate:
    """A loaded generation with what its gates may look at; `live` is None for the first one ever.

    `live_root` is this host's folder of the live generation, `pages_bytes` the pages of all generations that Redis
    may hold, `erased` what this night left out because it had to, `governor` how reading pages back spares readers
    (None: not at all), `unreadable` the live generation whose manifest cannot be read, `keep` how many superseded ones
    sweeps leave, `arms` what those of experiments take beside it, `build` the build
    that it was made by. `evidence` is gathered once for all gates.
    """

    manifest: Manifest
    root: Path
    items: ItemTable
    control: Control
    live: Manifest | None
    thresholds: GateThresholds
    history_limit: int
    live_root: Path | None = None
    pages_bytes: int | None = None
    erased: ErasedEntities = NO_ERASURES
    governor: GovernorConfig | None = None
    prepared_evidence: Evidence | None = field(default=None, repr=False)
    unreadable: str | None = None
    keep: int = 1
    arms: tuple[ArmRoom, ...] = ()
    build: Build | None = None

    def __post_init__(self) -> None:
        if self.prepared_evidence is None:
            evidence = Evidence(
                self.manifest, self.root, self.items, self.history_limit, self.live, self.live_root
            )
            object.__setattr__(self, "prepared_evidence", evidence)

    @property
    def evidence(self) -> Evidence:
        """Evidence that several gates look at."""
        return cast(Evidence, self.prepared_evidence)

    @property
    def baseline(self) -> str | None:
        """The live generation's id."""
        return None if self.live is None else self.live.generation

    def uncompared(self, threshold: float | str | None) -> Measurement:
        """Result of a gate that has no live manifest to compare with: passed only where nothing was ever live."""
        if self.unreadable is None:
            return Measurement(True, None, threshold, FIRST)
        return Measurement(False, None, threshold, UNREADABLE, self.unreadable)

    @property
    def is_retrained(self) -> bool:
        """True if another bundle made it than made the live generation."""
        return self.live is not None and self.live.bundle_digest != self.manifest.bundle_digest
