"""Features of a night, by hook: the one place that names them; the core imports none.

Each function returns the callables of one hook in the order in which they are called, and imports what that hook needs.
To take a feature out, remove its package and its lines here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime
    from pathlib import Path
    from typing import Any, Protocol

    import numpy as np
    import redis
    from numpy.typing import NDArray

    from cache.format.item_table import ItemTable
    from cache.store.artefacts import ArtefactStore
    from precompute.builds.build import AttributeFiles, Build
    from precompute.builds.seal import FactsOf
    from precompute.bulk.headroom import ArmRoom
    from precompute.bundles.bundle import Bundle
    from precompute.config.progress import Step
    from precompute.config.settings import NightConfig
    from precompute.gates.evidence.candidate import Gate
    from precompute.gates.evidence.evidence import AllowedByManifest
    from precompute.partitions.further_input import FurtherInput
    from precompute.releases.release_log import ReleaseLog
    from precompute.scoring.copies import EmbeddingCopies, NightCopies
    from precompute.scoring.input_samples import SampleTaker
    from precompute.scoring.scorers import ScoringHooks
    from precompute.sources.erasures import ErasedEntities
    from precompute.sources.features import EntityValues
    from precompute.sources.files import InputFiles
    from precompute.sources.unusable import UnusableRows

    class VectorBundle(Protocol):
        """Context of the bundle of `sources.item_vectors`, by a digest of the inputs and the files themselves."""

        def __call__(
            self,
            config: NightConfig,
            inputs: str,
            files: InputFiles,
            *,
            interactions_before: datetime | None,
            cut: datetime,
        ) -> AbstractContextManager[Bundle]: ...

    class ChooseCopies(Protocol):
        """Choose the earlier generation for the one in the making."""

        def __call__(
            self, releases: ReleaseLog, config: NightConfig, bundle: Bundle, *, making: str
        ) -> NightCopies: ...

    SettingCheck = Callable[[NightConfig], None]
    """Raises ConfigError for settings of a feature that cannot be used."""

    RemarkOnBegin = Callable[[Mapping[str, Any], NightConfig], str]
    """Line on the report of `begin`, behind a line break; empty where there is nothing to say."""

    GenerationNamed = Callable[[ArtefactStore, str, ErasedEntities], None]
    """Called when a generation has its id, before any host has files of it, with what it leaves out."""

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


def taking() -> Callable[[NightConfig], Step]:
    """Step `take_events`."""
    from precompute.events.taking import run

    return run


def before_begin() -> Callable[[NightConfig, str | None], tuple[str | None, str]]:
    """What a night does before `begin`, by its cut: position for `events_until` of that step, and a line on it."""
    from precompute.events.taking import take_before_begin

    return take_before_begin


def further_input() -> Callable[[NightConfig, str | None], FurtherInput]:
    """Input behind the team's own, up to a position."""
    from precompute.events.inputs import input_of_night

    return input_of_night


def remarks_on_begin() -> tuple[RemarkOnBegin, ...]:
    """Lines of features in the night's table."""
    from precompute.events.inputs import unlisted_in_words
    from precompute.reuse.night import base_remark

    return base_remark, unlisted_in_words


def vector_bundle() -> VectorBundle:
    """Maker of the bundle of a night whose items are a table of vectors."""
    from precompute.adapters.vector_bundle import vector_bundle as bundle_by_adapters

    return bundle_by_adapters


def choose_copies() -> ChooseCopies:
    """Chooser of what a night takes over from an earlier generation."""
    from precompute.reuse.night import choose_copies as by_reuse

    return by_reuse


def copies_of_embedding() -> Callable[[Build, Bundle, ItemTable, str | None], EmbeddingCopies]:
    """Vectors of items that need not be embedded on a device (None: the processor)."""
    from precompute.reuse.night import copies_of_embedding as by_reuse

    return by_reuse


def remarks_on_scores() -> tuple[Callable[[Sequence[Mapping[str, Any]]], str], ...]:
    """Lines in the night's table by the reports of shards, each behind a line break, or empty."""
    from precompute.reuse.night import users_remark

    return (users_remark,)


def feature_gates() -> tuple[Gate, ...]:
    """Gates of features, in the order in which they are run."""
    from precompute.reuse.identity import identity

    return (identity,)


def generation_named() -> tuple[GenerationNamed, ...]:
    """Notes on a generation that has its id."""
    from precompute.erasure.holders import note_left_out

    return (note_left_out,)


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
    """What features bring to the scoring of a build, anew for each."""
    from precompute.filters.item_attributes import allowed_items
    from precompute.reuse.night import BaseSource
    from precompute.scoring.scorers import ScoringHooks

    return ScoringHooks(allowed_items=(allowed_items,), copies=BaseSource())


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
    from precompute.events.inputs import event_facts
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
