"""Features of a night, by hook: the one place that names them; the core imports none.

Each function returns the callables of one hook in the order in which they are called, and imports what that hook needs.
To take a feature out, remove its package and its lines here.
"""

from collections.abc import Callable, Collection

import redis

from precompute.builds.seal import FactsOf
from precompute.bulk.headroom import ArmRoom
from precompute.config.progress import Step
from precompute.config.settings import NightConfig
from precompute.releases.release_log import ReleaseLog
from precompute.scoring.input_samples import SampleTaker

RoomsBeside = Callable[[NightConfig, "redis.Redis"], tuple[ArmRoom, ...]]
"""Room that generations of other namespaces take in Redis and on hosts beside the own ones."""

AfterPublish = Callable[[NightConfig, ReleaseLog, Collection[str]], Step]
"""Settle or sweep what a feature keeps, given the generations that are still needed; returns fields of the report."""


def sample_takers() -> tuple[SampleTaker, ...]:
    """Takers of users' inputs while `quantize` reads them, new ones for each run."""
    from precompute.quality.probe import ProbeTaker

    return (ProbeTaker(),)


def facts() -> tuple[FactsOf, ...]:
    """Facts of features for the manifest."""
    from precompute.events.files import event_facts
    from precompute.quality.probe import probe_facts
    from precompute.reuse.reuse_fact import reuse_facts

    return event_facts, reuse_facts, probe_facts


def rooms() -> tuple[RoomsBeside, ...]:
    """Rooms that `verify` counts beside the night's own generations."""
    from precompute.traffic.experiments import arms_room

    return (arms_room,)


def after_publish() -> tuple[AfterPublish, ...]:
    """Sweeps of `retire`, after its own."""
    from precompute.erasure.erasing import settle_in_night
    from precompute.events.stream import trim_in_night
    from precompute.traffic.exposures import gather_in_night

    return settle_in_night, gather_in_night, trim_in_night
