"""Candidate for publishing with its evidence, and gates: rules with public ids that give verdicts on it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cache.control.control_keys import Control
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from precompute.builds.build import Build
from precompute.bulk.headroom import ArmRoom
from precompute.config.settings import GateThresholds, GovernorConfig
from precompute.gates.evidence.evidence import AllowedByManifest, Evidence
from precompute.scoring.scorers import NO_HOOKS, ScoringHooks
from precompute.sources.erasures import NO_ERASURES, ErasedEntities

FIRST_GENERATION_NOTE = "the first generation has nothing to be compared with"
UNREADABLE_LIVE_NOTE = "live manifest cannot be read, so nothing can be compared with it"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value held against a threshold; `baseline` is the live generation that it was compared with."""

    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline: str | None = None

    def under(self, rule: str) -> "Verdict":
        """The verdict of the rule that measured this."""
        return Verdict(rule, self.passed, self.value, self.threshold, self.note, self.baseline)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one gate: what it measured; `overridden` is the reason for which a failure was let pass."""

    rule: str
    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline: str | None = None
    overridden: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for the manifest; what does not apply is left out."""
        fields: dict[str, Any] = {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.value,
            "threshold": self.threshold,
            "note": self.note,
        }
        if self.baseline is not None:
            fields["baseline"] = self.baseline
        if self.overridden is not None:
            fields["overridden"] = self.overridden
        return fields


@dataclass(frozen=True, eq=False)
class Candidate:
    """A loaded generation with what its gates may look at; `live` is None for the first one ever.

    `live_root` is this host's folder of the live generation, `pages_bytes` the pages of all generations that Redis
    may hold, `erased` what this night left out because it had to, `governor` how reading pages back spares readers
    (None: not at all), `unreadable` the live generation whose manifest cannot be read, `keep` how many superseded ones
    sweeps leave, `arms` what those of experiments take beside it, `build` the build
    that it was made by, `allowed_items` and `scoring_hooks` what features bring. `evidence` is gathered once for all
    gates.
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
    allowed_items: tuple[AllowedByManifest, ...] = ()
    scoring_hooks: ScoringHooks = NO_HOOKS
    build: Build | None = None

    def __post_init__(self) -> None:
        if self.prepared_evidence is None:
            evidence = Evidence(
                self.manifest,
                self.root,
                self.items,
                self.history_limit,
                self.live,
                self.live_root,
                self.allowed_items,
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
            return Measurement(True, None, threshold, FIRST_GENERATION_NOTE)
        return Measurement(False, None, threshold, UNREADABLE_LIVE_NOTE, self.unreadable)

    @property
    def is_retrained(self) -> bool:
        """True if another bundle made it than made the live generation."""
        return self.live is not None and self.live.bundle_digest != self.manifest.bundle_digest


Measure = Callable[[Candidate], Measurement]


@dataclass(frozen=True, slots=True)
class Gate:
    """A rule; one of `integrity` is on what is simply wrong, and nobody may wave it through.

    One that `wants_interactions` is left out of a night that was given none: it has nothing to ask.
    """

    rule: str
    is_integrity: bool
    measure: Measure
    wants_interactions: bool = False

    def __call__(self, candidate: Candidate) -> Measurement:
        """Measures a candidate; what it reads may make it raise anything."""
        return self.measure(candidate)


def integrity(rule: str) -> Callable[[Measure], Gate]:
    """Decorator of a rule on what is simply wrong; `rule` is its id for good: manifests and alerts hold it."""
    return lambda measure: Gate(rule, True, measure)


def judgement(rule: str, *, wants_interactions: bool = False) -> Callable[[Measure], Gate]:
    """Decorator of a rule on what is unusual: a person may know why it is right."""
    return lambda measure: Gate(rule, False, measure, wants_interactions)


def at_least(
    value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Measurement:
    """A value and its floor; NaN fails."""
    return Measurement(bool(value >= threshold), round(float(value), 6), threshold, note, baseline)


def at_most(
    value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Measurement:
    """A value and its ceiling; NaN fails."""
    return Measurement(bool(value <= threshold), round(float(value), 6), threshold, note, baseline)


def none_of(count: int, note: str, baseline: str | None = None) -> Measurement:
    """A count of what must not occur even once; `note` says where it was seen."""
    return Measurement(not count, count, 0, note if count else "", baseline)


def not_measured(threshold: float | None, reason: str) -> Measurement:
    """A case in which a gate has nothing to measure, by definition and not by failure."""
    return Measurement(True, None, threshold, reason)


def worst_of(figures: Mapping[str, float]) -> tuple[str, float]:
    """The smallest with its name, or NaN if there is one (`min` alone would depend on the order)."""
    return min(
        figures.items(),
        key=lambda named_figure: -math.inf if math.isnan(named_figure[1]) else named_figure[1],
    )
