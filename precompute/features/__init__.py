"""Features of a night, by hook: the one place that names them; the core imports none.

Each function returns the callables of one hook in the order in which they are called, and imports what that hook needs.
To take a feature out, remove its package and its lines here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path
    from typing import Any

    import numpy as np
    import redis
    from numpy.typing import NDArray

    from cache.format.item_table import ItemTable
    from precompute.builds.build import AttributeFiles, Build
    from precompute.builds.seal import FactsOf
    from precompute.bulk.headroom import ArmRoom
    from precompute.config.progress import Step
    from precompute.config.settings import NightConfig
    from precompute.gates.evidence.evidence import AllowedByManifest
    from precompute.releases.release_log import ReleaseLog
    from precompute.scoring.input_samples import SampleTaker
    from precompute.scoring.scorers import ScoringHooks
    from precompute.sources.features import EntityValues
    from precompute.sources.unusable import UnusableRows

    SettingCheck = Callable[[NightConfig], None]
    """Raises ConfigError for settings of a feature that cannot be used."""

    ItemAttributesOf = Callable[
        [NightConfig, ItemTable, Path, EntityValues, UnusableRows], dict[str, AttributeFiles]
    ]
    """Write attributes of items below a folder, with the values that events set; their kinds and files by name."""

    TablesByScores = Callable[[Build, Mapping[str, Any], ItemTable, NDArray[np.float32]], Step]
    """Write tables by attributes and scores of items; returns fields of the step's report."""

    RoomsBeside = Callable[[NightConfig, "redis.Redis"], tuple[ArmRoom, ...]]
    """Room that generations of other namespaces take in Redis and on hosts beside the own ones."""

    AfterPublish = Callable[[NightConfig, ReleaseLog, Collection[str]], Step]
    """Settle or sweep what a feature keeps, given the generations still needed; returns fields of the report."""


def setting_checks() -> tuple[SettingCheck, ...]:
    """Checks of settings, before `begin` writes anything."""
    from precompute.filters.item_attributes import demand_filters

    return (demand_filters,)


def item_attributes() -> tuple[ItemAttributesOf, ...]:
    """Attributes of items that `begin` writes."""
    from precompute.filters.item_attributes import attributes_of_night

    return (attributes_of_night,)


def tables_by_scores() -> tuple[TablesByScores, ...]:
    """Tables that follow from the items' scores, as the defaults do."""
    from precompute.filters.facets import write_facets

    return (write_facets,)


def scoring_hooks() -> ScoringHooks:
    """What features bring to the scoring of a build."""
    from precompute.filters.item_attributes import allowed_items
    from precompute.scoring.scorers import ScoringHooks

    return ScoringHooks(allowed_items=(allowed_items,))


def allowed_by_manifest() -> tuple[AllowedByManifest, ...]:
    """Items that lists are of, as gates find them: by the manifest."""
    from precompute.filters.item_attributes import allowed_by_manifest as by_filters

    return (by_filters,)


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
