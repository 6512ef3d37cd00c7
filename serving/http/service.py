"""The parts of a running service that its routes speak to."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serving.dashboard.service import Dashboard
from serving.events.intake import EventIntake
from serving.experiments.router import ExperimentRouter
from serving.explain.explainer import Explainer
from serving.lookup.service import LookupService
from serving.quality.monitor import QualityMonitor
from serving.ranking.filters import Filters
from serving.replica.freshness import Nights


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(LookupService):
    """Lookups, and everything else that a caller or an operator may ask a replica for."""

    has_tokens: bool
    drain: Callable[[], Awaitable[None]]
    nights: Nights
    experiments: ExperimentRouter
    events: EventIntake | None
    """None where `[events] enabled` is false."""
    expose: Callable[[], Awaitable[bytes]]
    dashboard: Dashboard
    explainer: Explainer
    quality: QualityMonitor
    filters: Filters
