"""Features of a night, by hook: the only module that names them; the core imports none.

Each function returns the callables of one hook in calling order, and imports what the hook needs. To remove a feature,
remove its package and its lines here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime
    from pathlib import Path
    from typing import Protocol

    import numpy as np
    import redis
    from numpy.typing import NDArray

    from cache.format.item_table import ItemTable
    from cache.store.artefacts import ArtefactStore
    from precompute.builds.build import Build
    from precompute.builds.reports import AttributeFiles, BeginReport, FacetFields, ShardReport
    from precompute.builds.seal import CollectFacts
    from precompute.bulk.headroom import ArmRoom
    from precompute.bundles.bundle import Bundle
    from precompute.config.settings import NightConfig
    from precompute.gates.evidence.candidate import Gate
    from precompute.gates.evidence.evidence import FindAllowedItems
    from precompute.partitions.night_input import FurtherInput, TakenEvents
    from precompute.releases.release_log import Releases
    from precompute.reuse.prior import PriorIndex
    from precompute.scoring.input_samples import SampleTaker
    from precompute.scoring.scorers import ScoringHooks
    from precompute.sources.erasures import ErasedEntities
    from precompute.sources.features import EntityValues
    from precompute.sources.files import InputFiles
    from precompute.sources.unusable import UnusableRows

    class VectorBundle(Protocol):
        """Function that yields the bundle of `sources.item_vectors`, from a digest of the inputs and the files."""

        def __call__(
            self,
            config: NightConfig,
            inputs_digest: str,
            input_files: InputFiles,
            *,
            interactions_before: datetime | None,
            cut: datetime,
        ) -> AbstractContextManager[Bundle]: ...

    SettingCheck = Callable[[NightConfig], None]
    """Function that raises ConfigError for unusable settings of a feature."""

    RemarkOnBegin = Callable[[BeginReport, NightConfig], str]
    """Function that returns a line on the report of `begin`, after a line break; empty if there is nothing to report.
    """

    GenerationNamed = Callable[[ArtefactStore, str, ErasedEntities], None]
    """Function that notes the erased entities that a new generation leaves out, before any host has its files."""

    ItemAttributesOf = Callable[[NightConfig, ItemTable, Path, EntityValues, UnusableRows], dict[str, AttributeFiles]]
    """Function that writes attributes of items into a folder, with values from events; returns their kinds and files by
    name."""

    TablesByScores = Callable[[Build, Mapping[str, AttributeFiles], ItemTable, NDArray[np.float32]], FacetFields]
    """Function that writes tables by attributes and scores of items; returns fields of the step's report."""

    RemarkOnPublish = Callable[[NightConfig, str], str]
    """Function that returns a line on a publish, before the pointer moves; empty if there is nothing to report."""

    RoomsBeside = Callable[[NightConfig, "redis.Redis"], tuple[ArmRoom, ...]]
    """Function that returns the room that generations of other namespaces take in Redis and on hosts."""

    AfterPublish = Callable[[NightConfig, Releases, Collection[str]], Mapping[str, int]]
    """Function that sweeps a feature's stored data, given the needed generations; returns fields of the report."""


def take_events_step() -> Callable[[NightConfig], TakenEvents]:
    """Return the step `take_events`."""
    from precompute.events.taking import run

    return run


def events_before_begin() -> Callable[[NightConfig, str | None], tuple[str | None, str]]:
    """Return the function to call before `begin`: for a cut it returns the position for `events_until`, and a line."""
    from precompute.events.taking import take_before_begin

    return take_before_begin


def further_input_reader() -> Callable[[NightConfig, str | None], FurtherInput]:
    """Return the function that lists inputs in addition to the sources, up to a position."""
    from precompute.events.inputs import event_input

    return event_input


def remarks_on_begin() -> tuple[RemarkOnBegin, ...]:
    """Return the functions of lines on `begin` in the night's table."""
    from precompute.events.inputs import describe_unlisted_items
    from precompute.reuse.reasons import base_remark

    return base_remark, describe_unlisted_items


def vector_bundle_maker() -> VectorBundle:
    """Return the function that makes the bundle of a night whose items are a table of vectors."""
    from precompute.adapters.vector_bundle import vector_bundle as bundle_by_adapters

    return bundle_by_adapters


def prior_index() -> type[PriorIndex]:
    """Return the index of an earlier generation's data that a build can copy."""
    from precompute.reuse.prior import PriorIndex

    return PriorIndex


def remarks_on_scores() -> tuple[Callable[[Sequence[ShardReport]], str], ...]:
    """Return the functions of lines in the night's table on the reports of shards; each starts with a line break."""
    from precompute.reuse.reasons import users_remark

    return (users_remark,)


def feature_gates() -> tuple[Gate, ...]:
    """Return the gates of features, in the order in which they run."""
    from precompute.reuse.identity import identity

    return (identity,)


def notes_on_new_generation() -> tuple[GenerationNamed, ...]:
    """Return the functions that note what a generation leaves out."""
    from precompute.erasure.holders import note_left_out

    return (note_left_out,)


def setting_checks() -> tuple[SettingCheck, ...]:
    """Return the checks of settings, which run before `begin` writes anything."""
    from precompute.filters.item_attributes import demand_filters

    return (demand_filters,)


def item_attribute_writers() -> tuple[ItemAttributesOf, ...]:
    """Return the functions that write attributes of items for `begin`."""
    from precompute.filters.item_attributes import attributes_of_night

    return (attributes_of_night,)


def score_table_writers() -> tuple[TablesByScores, ...]:
    """Return the functions that write tables from the items' scores."""
    from precompute.filters.facets import write_facets

    return (write_facets,)


def scoring_hooks() -> ScoringHooks:
    """Return new hooks for the scoring of one build."""
    from precompute.filters.item_attributes import allowed_items
    from precompute.scoring.scorers import ScoringHooks

    return ScoringHooks(allowed_items=(allowed_items,), open_prior=prior_index().open)


def allowed_item_masks() -> tuple[FindAllowedItems, ...]:
    """Return the functions that compute masks of allowed items from the manifest, for gates."""
    from precompute.filters.item_attributes import allowed_by_manifest as by_filters

    return (by_filters,)


def sample_takers() -> tuple[SampleTaker, ...]:
    """Return new functions that take samples of the inputs of `quantize`."""
    from precompute.quality.probe import ProbeTaker

    return (ProbeTaker(),)


def fact_functions() -> tuple[CollectFacts, ...]:
    """Return the functions of facts for the manifest."""
    from precompute.events.inputs import event_facts_of_generation
    from precompute.quality.probe import probe_fact
    from precompute.reuse.reuse_fact import reuse_facts

    return event_facts_of_generation, reuse_facts, probe_fact


def arm_room_functions() -> tuple[RoomsBeside, ...]:
    """Return the functions of the room that `verify` adds to that of the night's own generations."""
    from precompute.traffic.experiments import compute_arm_rooms

    return (compute_arm_rooms,)


def remarks_on_publish() -> tuple[RemarkOnPublish, ...]:
    """Return the functions of lines on `publish`."""
    from precompute.traffic.arm_comparison import ending_remark

    return (ending_remark,)


def sweeps_after_publish() -> tuple[AfterPublish, ...]:
    """Return the sweeps that `retire` runs after its own."""
    from precompute.erasure.erasing import settle_erasures_in_night
    from precompute.events.stream import trim_in_night
    from precompute.traffic.exposures import gather_in_night

    return settle_erasures_in_night, gather_in_night, trim_in_night
