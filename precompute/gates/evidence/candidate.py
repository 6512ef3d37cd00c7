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
from precompute.gates.evidence.evidence import Evidence, FindAllowedItems
from precompute.scoring.scorers import NO_HOOKS, ScoringHooks
from precompute.sources.erasures import NO_ERASURES, ErasedEntities

FIRST_GENERATION_NOTE = "the first generation has nothing to be compared with"
UNREADABLE_LIVE_NOTE = "live manifest cannot be read, so nothing can be compared with it"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Value compared with a threshold; `baseline_generation` is the live generation if it was compared with that."""

    passed: bool
    measured_value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline_generation: str | None = None

    def to_verdict(self, rule: str) -> "Verdict":
        """Return the verdict of the rule that measured this."""
        return Verdict(rule, self.passed, self.measured_value, self.threshold, self.note, self.baseline_generation)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one gate with its measurement; `override_reason` is the reason for letting a failure pass."""

    rule: str
    passed: bool
    measured_value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline_generation: str | None = None
    override_reason: str | None = None

    @property
    def is_judged(self) -> bool:
        """False if the gate passed because there was nothing to judge by."""
        return not self.passed or self.measured_value is not None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form for the manifest, without fields that do not apply."""
        verdict_fields: dict[str, Any] = {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.measured_value,
            "threshold": self.threshold,
            "note": self.note,
        }
        if self.baseline_generation is not None:
            verdict_fields["baseline"] = self.baseline_generation
        if self.override_reason is not None:
            verdict_fields["overridden"] = self.override_reason
        return verdict_fields


@dataclass(frozen=True, eq=False)
class Candidate:
    """Loaded generation with the facts that its gates may use; `live` is None for the first generation ever.

    `live_root` is this host's folder of the live generation, `pages_bytes` the size of the pages of all generations
    that Redis may hold, `erased` the erased entities that this night left out, `governor` the pacing of reading pages
    back (None: unpaced), `unreadable_live_generation` the live generation if its manifest cannot be read,
    `superseded_count` the number of superseded generations that sweeps keep, `arm_rooms` the room of the arms of
    experiments, `build` the build of this generation; `allowed_items` and `scoring_hooks` are hooks of features.
    `evidence` is gathered once for all gates.
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
    unreadable_live_generation: str | None = None
    superseded_count: int = 1
    arm_rooms: tuple[ArmRoom, ...] = ()
    allowed_items: tuple[FindAllowedItems, ...] = ()
    scoring_hooks: ScoringHooks = NO_HOOKS
    build: Build | None = None

    def __post_init__(self) -> None:
        if self.prepared_evidence is None:
            evidence = Evidence(
                self.manifest, self.root, self.items, self.history_limit, self.live, self.live_root, self.allowed_items
            )
            object.__setattr__(self, "prepared_evidence", evidence)

    @property
    def evidence(self) -> Evidence:
        """Evidence that several gates use."""
        return cast(Evidence, self.prepared_evidence)

    @property
    def baseline_generation(self) -> str | None:
        """Id of the live generation."""
        return None if self.live is None else self.live.generation

    def uncompared_measurement(self, threshold: float | str | None) -> Measurement:
        """Return the result of a gate without a live manifest to compare with: passed only if there was never one."""
        if self.unreadable_live_generation is None:
            return Measurement(True, None, threshold, FIRST_GENERATION_NOTE)
        return Measurement(False, None, threshold, UNREADABLE_LIVE_NOTE, self.unreadable_live_generation)

    @property
    def is_retrained(self) -> bool:
        """True if the bundle differs from the live generation's."""
        return self.live is not None and self.live.bundle_digest != self.manifest.bundle_digest


Measure = Callable[[Candidate], Measurement]


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate with its rule; an `is_integrity` rule detects invalid data, and cannot be overridden.

    A gate that `wants_interactions` does not apply to a night without interactions, which it would compare.
    """

    rule: str
    is_integrity: bool
    measure: Measure
    wants_interactions: bool = False

    def __call__(self, candidate: Candidate) -> Measurement:
        """Measure a candidate; any error may be raised."""
        return self.measure(candidate)


def integrity(rule: str) -> Callable[[Measure], Gate]:
    """Decorate a rule that detects invalid data; `rule` is its permanent id: manifests and alerts contain it."""
    return lambda measure: Gate(rule, True, measure)


def judgement(rule: str, *, wants_interactions: bool = False) -> Callable[[Measure], Gate]:
    """Decorate a rule that detects unusual data, which a person may override."""
    return lambda measure: Gate(rule, False, measure, wants_interactions)


def at_least(
    measured_value: float, threshold: float, note: str = "", baseline_generation: str | None = None
) -> Measurement:
    """Compare a value with its floor; NaN fails."""
    return Measurement(
        bool(measured_value >= threshold), round(float(measured_value), 6), threshold, note, baseline_generation
    )


def at_most(
    measured_value: float, threshold: float, note: str = "", baseline_generation: str | None = None
) -> Measurement:
    """Compare a value with its ceiling; NaN fails."""
    return Measurement(
        bool(measured_value <= threshold), round(float(measured_value), 6), threshold, note, baseline_generation
    )


def none_of(case_count: int, note: str, baseline_generation: str | None = None) -> Measurement:
    """Compare a count with zero; `note` describes where a case was found."""
    return Measurement(not case_count, case_count, 0, note if case_count else "", baseline_generation)


def not_measured(threshold: float | None, reason: str) -> Measurement:
    """Return a passed measurement for a gate that by definition has nothing to measure."""
    return Measurement(True, None, threshold, reason)


def worst_of(figures_by_name: Mapping[str, float]) -> tuple[str, float]:
    """Return the smallest figure with its name, or NaN if there is one (`min` alone would depend on the order)."""
    return min(
        figures_by_name.items(), key=lambda named_figure: -math.inf if math.isnan(named_figure[1]) else named_figure[1]
    )
