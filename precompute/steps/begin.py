"""Step `begin`: names the generation, pins its inputs and bundle, and writes its catalogue and partition."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np

from cache.control.control_keys import demand_readers, demand_readers_of_night
from cache.control.states import GenerationState, demand_allowed, fold_releases, rolled_back_remedy
from cache.errors import ConfigError, Conflict, Refused, SourceError, StoreError
from cache.format.item_table import ItemTable
from cache.format.manifest import CUT_CHARS, FEATURE_ONLY_USERS_FACT, MANIFEST_FORMAT
from cache.formats import MANIFEST
from cache.store.artefacts import ArtefactStore, generation_path, link_or_copy_file
from cache.store.erasures import all_erasures, demand_no_lost_erasure
from cache.store.releases import MOVE_ACTIONS
from precompute.builds.build import (
    Build,
    attribute_paths,
    data_until_of,
    find_newer_live,
    generation_id,
    record_copies,
    settings_digest,
    sweep_copies,
)
from precompute.builds.reports import (
    BEGIN_REPORT,
    AttributeFields,
    AttributeFiles,
    BeginReport,
    BegunBuild,
    EventValueFields,
    FacetFields,
    FileFields,
    InputFields,
    ItemFields,
    RemarkFields,
    UserFields,
)
from precompute.builds.seal import WRITER_TEXT_BY_FORMAT, manifest_format_of
from precompute.builds.tables import demand_histories, demand_table_values
from precompute.bulk.headroom import convert_disk_errors
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import chosen_bundle
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time
from precompute.features import (
    events_before_begin,
    further_input_reader,
    item_attribute_writers,
    notes_on_new_generation,
    prior_index,
    remarks_on_begin,
    score_table_writers,
    setting_checks,
    vector_bundle_maker,
)
from precompute.partitions import catalogue
from precompute.partitions.digests import item_digests_paths
from precompute.partitions.holdout import Holdout
from precompute.partitions.marks import write_marks
from precompute.partitions.night_input import FurtherInput, NightInput, NightValues
from precompute.partitions.partition import (
    UNKNOWN_EXAMPLES_MAX,
    PartitionJob,
    PartitionResult,
    partition_file_paths,
    write_count_files,
)
from precompute.partitions.shard_files import TOUCHED_KIND
from precompute.releases.recovery import describe_rolled_back_model
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.sweep import sweep
from precompute.scoring.copies import Prior
from precompute.scoring.defaults import DEFAULTS_FILE as DEFAULTS
from precompute.scoring.defaults import compute_popularity_scores, write_defaults
from precompute.scoring.items import lay_out_items
from precompute.scoring.towers import demand_feature_types
from precompute.sources.erasures import ErasedEntities
from precompute.sources.files import InputEntry, InputFiles, SourceFile, copies_remarks, digest_files, digest_of
from precompute.sources.plausibility import (
    InteractionFigures,
    catalogue_in_words,
    demand_enough_ids,
    items_without_vector_remarks,
    plausibility_remarks,
    unknown_ids_remarks,
    unknown_item_share,
)
from precompute.sources.readers import EVENT_INTERACTIONS_SOURCE, INTERACTIONS_SOURCE
from precompute.sources.times import MICROSECONDS_PER_SECOND
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD, UnusableRows, merge_reports
from precompute.steps.night import Night, StepRow

ERASURE_TRIES_MAX = 10


@dataclass(slots=True, eq=False)
class BegunNight:
    """Night that begins: its input, and the products of its sub-steps (`READING`, `AFTER_READING`) once they have run.

    `known_fields` and `early_remarks` are fields of the report and remarks known before the sub-steps run.
    """

    build: Build
    bundle: Bundle
    prior: Prior
    cut_text: str | None
    erased_entities: ErasedEntities
    known_fields: InputFields
    further_input: FurtherInput
    input_files: InputFiles
    progress: Progress
    unusable_rows: UnusableRows
    early_remarks: Sequence[str] = ()
    holdout: Holdout = field(default_factory=Holdout)
    files_by_attribute: dict[str, AttributeFiles] = field(default_factory=dict)
    bundle_pinning: Future[list[str]] = field(init=False)
    event_values: NightValues = field(init=False)
    fingerprint_files: list[str] = field(init=False)
    catalogue_fields: catalogue.CatalogueFields = field(init=False)
    item_columns: str | None = field(init=False)
    items: ItemTable = field(init=False)
    partition_result: PartitionResult = field(init=False)

    @property
    def counts_clicks(self) -> bool:
        """True if the defaults are the most clicked items, written by `begin`; else `embed_items` computes them."""
        return bool(self.build.config.sources.interactions)

    def report_rows_read(self, row_count: int) -> None:
        """Report progress; raise the error of a model that cannot be opened now, not after hours of reading."""
        if self.bundle_pinning.done():
            self.bundle_pinning.result()
        self.progress("read interactions", row_count, 0)


@convert_disk_errors
def run(
    config: NightConfig,
    *,
    data_until: str | None,
    run_after: str | None,
    named: str | None = None,
    events_until: str | None = None,
    progress: Progress = quiet,
) -> BegunBuild:
    """Name the generation, pin its inputs, write the catalogue and partition the sources by hash range.

    The cut is `data_until`, else the setting, else `run_after`: rows at or after it are left out, rows without a time
    are kept. Without a cut, the generation is `named` after a time and all rows count. Events are read up to a
    position, by default all that are in files, also those after the cut. If the live generation is newer than a cut
    that was not chosen explicitly, nothing is computed: the result names the live generation, with the reason in
    `nothing_newer`.
    """
    data_until = data_until or config.data_until
    cut_time = data_until or run_after or named
    if cut_time is None:
        raise ConfigError("a night needs a cut: set data_until, or pass the scheduler's run_after")
    cut, night_further_input = parse_time(cut_time), further_input_reader()(config, events_until)
    if not config.sources.names_users:
        raise ConfigError(
            "sources.interactions is empty, and so are sources.user_vectors and sources.user_features: name the files "
            "the night is computed from, in the file given by --config or LARDER_CONFIG"
        )
    with open_releases(config) as releases:  # checked before hours of work that could not be published
        if cut_time is named:
            # File times and event positions may come from a clock that is ahead. A generation named after such a time
            # would keep all nights before that time from being published.
            clock_time = datetime.fromtimestamp(int(releases.clock()), UTC)
            # The generation is as new as its newest further input.
            newest_input_at = (
                cut
                if night_further_input.newest_unix_s is None
                else max(cut, datetime.fromtimestamp(night_further_input.newest_unix_s, UTC))
            )
            cut = min(newest_input_at, clock_time)
        sweep_copies(releases.store)
        demand_readers_of_night(releases.control)
        releases.store.demand_write_once()
        demand_no_lost_erasure(releases.store)
        releases.demand_agreement()
        if (live_generation := find_newer_live(releases, cut, is_cut_chosen=data_until is not None)) is not None:
            return _already_live_report(releases.store, config, live_generation, cut, is_named=cut_time is named)
    cut_text = data_until or run_after
    input_files = InputFiles.of(config, night_further_input.files)
    if not config.sources.item_vectors:
        with chosen_bundle(config) as bundle:
            return _begin(config, bundle, cut, night_further_input, input_files, cut_text=cut_text, progress=progress)
    # Pinned before the bundle is made, so that changes of the files from here on are noticed.
    pinned_inputs = digest_files(input_files.all_files)
    # Events affect the bundle only by the vectors of new items: it stays the same for all nights over these tables.
    non_event_digest = digest_of(
        [
            pinned_input
            for file, pinned_input in zip(input_files.all_files, pinned_inputs[1], strict=True)
            if file not in night_further_input.files
        ]
    )
    cutoff_at = parse_time(cut_text) if cut_text else None
    with ExitStack() as bundle_stack:
        with explain_changed_sources(pinned_inputs[0], input_files.all_files):
            bundle_context = vector_bundle_maker()(
                config, non_event_digest, input_files, interactions_before=cutoff_at, cut=cut
            )
            bundle = bundle_stack.enter_context(bundle_context)
        return _begin(
            config,
            bundle,
            cut,
            night_further_input,
            input_files,
            cut_text=cut_text,
            progress=progress,
            pinned_inputs=pinned_inputs,
        )


def _already_live_report(
    store: ArtefactStore, config: NightConfig, live_generation: str, cut: datetime, *, is_named: bool
) -> BegunBuild:
    """Return the result of a night that is not computed because the live generation is newer."""
    if is_named:
        reason = (
            f"no input is newer: {live_generation} is live already, and the last change of an input was at "
            f"{cut.isoformat()}; to "
            "compute it again all the same (for other settings), give --data-until"
        )
    else:
        reason = (
            f"{live_generation} is live already, and newer than this run's time {cut.isoformat()}: nothing is computed"
        )
    return {
        "generation": live_generation,
        "url": f"{store.url}/{generation_path(live_generation)}",
        "shards": list(range(config.shards)),
        "already_live": True,
        "nothing_newer": reason,
    }


def _begin(
    config: NightConfig,
    bundle: Bundle,
    cut: datetime,
    night_further_input: FurtherInput,
    input_files: InputFiles,
    *,
    cut_text: str | None,
    progress: Progress,
    pinned_inputs: tuple[str, list[InputEntry]] | None = None,
) -> BegunBuild:
    demand_table_values(config, bundle)
    demand_feature_types(config, bundle)
    demand_histories(config, bundle)
    for demand_settings in setting_checks():
        demand_settings(config)
    sources_digest, inputs = pinned_inputs or digest_files(input_files.all_files)
    store = config.store()
    for _ in range(ERASURE_TRIES_MAX):
        erased_entities = ErasedEntities.of(all_erasures(store))
        inputs_digest = erased_entities.digest(sources_digest)
        generation = generation_id(cut, config, bundle.digest, inputs_digest)
        build = Build(config, store, generation)
        with open_releases(config) as releases:
            if (manifest_version := manifest_format_of(config, bundle)) != MANIFEST_FORMAT:
                demand_readers(releases.control, {MANIFEST: manifest_version}, WRITER_TEXT_BY_FORMAT[manifest_version])
            state = releases.state(generation)
            begun_build: BegunBuild = {
                "generation": generation,
                "url": f"{build.store.url}/{generation_path(generation)}",
                "shards": list(range(config.shards)),
                "already_live": state is GenerationState.LIVE,
            }
            if state is GenerationState.LIVE:
                return begun_build
            rolled_back_remarks = _compare_with_rolled_back(releases, build, cut_text)
            demand_allowed("begin", generation, state)
            if state is None:
                releases.note(generation, GenerationState.BEGUN)
            rolled_back_remarks += describe_rolled_back_model(releases, bundle.digest)  # before `sweep`
            sweep(config, releases, attempt=generation, generation_being_made=generation)
            prior = prior_index().choose(releases, config, bundle, generation_being_made=generation)
        # An erasure is recorded first, then checks generations; this night is noted first, then checks erasures. So one
        # sees the other.
        if ErasedEntities.of(all_erasures(store)) == erased_entities:
            break
    else:
        raise Conflict("erasures were written during each of several attempts; run `begin` again")
    if build.read_report(BEGIN_REPORT) is None:
        for note_named in notes_on_new_generation():
            note_named(store, generation, erased_entities)
        record_copies(store, generation)
        known_fields: InputFields = {
            "inputs_digest": inputs_digest, "inputs": inputs, "bundle_digest": bundle.digest,
            "erased": list(erased_entities.numbers), "settings": settings_digest(config), "cut": cut_text,
        }  # fmt: skip
        unusable = UnusableRows(erased_entities.users | erased_entities.items)
        night = BegunNight(
            build, bundle, prior, cut_text, erased_entities, known_fields, night_further_input, input_files,
            progress, unusable,
            early_remarks=rolled_back_remarks,
        )  # fmt: skip
        _prepare(night, sources_digest)
    return begun_build


def _compare_with_rolled_back(releases: Releases, build: Build, cut_text: str | None) -> list[str]:
    """Raise Refused if the night would hold the same as a rolled-back generation, unless readers have that again.

    Only a move to such a generation ends this, not its verification. Returns a remark if one with the same inputs,
    settings and bundle cannot be compared, since its files are removed, and no night of these was published since.
    """
    view = releases.view()
    # From moves alone, since a later verification, refusal or retirement replaces the state in the whole ledger.
    moves = fold_releases([release for release in view.history if release.action in MOVE_ACTIONS])
    same_rows_by_generation = {
        generation: None
        if view.state(generation) is GenerationState.RETIRED
        else _has_same_rows(replace(build, generation=generation), build.generation, cut_text)
        for generation in moves.state_by_generation
        if generation[CUT_CHARS:] == build.generation[CUT_CHARS:]
    }
    live_generation, remarks = moves.live_generation or "", []
    if same_rows_by_generation.get(live_generation):
        return []
    for generation, has_same_rows in same_rows_by_generation.items():
        if moves.state_by_generation[generation] is not GenerationState.ROLLED_BACK or has_same_rows is False:
            continue
        left_epoch = moves.left_epoch_by_generation[generation]
        reason = next((release.reason for release in view.history if release.epoch == left_epoch), "")
        if has_same_rows:
            can_be_published = generation[:CUT_CHARS] >= live_generation[:CUT_CHARS]
            subject = "it" if generation == build.generation else f"it would hold the same as {generation}, which"
            raise Refused(
                f"cannot begin {build.generation}: {subject} was rolled back: {reason}; "
                f"{rolled_back_remedy(generation, can_be_published=can_be_published)}",
                rule="rolled_back", value=build.generation, threshold=generation,
            )  # fmt: skip
        if live_generation in same_rows_by_generation and moves.live_epoch > left_epoch:
            continue
        remarks.append(
            f"has the files, settings and model of {generation}, which was rolled back ({reason}); what is left of "
            "that does not say whether its lists were the same"
        )
    return remarks


def _has_same_rows(earlier_build: Build, generation: str, cut_text: str | None) -> bool | None:
    """Return whether a night with this cut reads the rows that an earlier one read of the same files; None if unknown.

    Events are the same if the files are, since no cut applies to them.
    """
    if earlier_build.generation == generation:
        return True
    begin_report = earlier_build.read_report(BEGIN_REPORT)
    if begin_report is None or not {"cut", "late", "rows"} <= begin_report.keys():
        return None
    cut_us, earlier_cut_us = _cut_us(cut_text), _cut_us(begin_report["cut"])
    if cut_us < earlier_cut_us:
        return begin_report["rows"]["newest_us"] < cut_us
    if not begin_report["late"] or cut_us == earlier_cut_us:
        return True
    oldest_late_us = begin_report.get("oldest_late_us")  # missing in reports of Larder 0.1
    return None if oldest_late_us is None else cut_us <= oldest_late_us


def _cut_us(cut_text: str | None) -> float:
    """Return a cut in microseconds since 1970; infinite without one, as all rows count then."""
    return parse_time(cut_text).timestamp() * MICROSECONDS_PER_SECOND if cut_text else math.inf


def _prepare(night: BegunNight, sources_digest: str) -> None:
    """Run all sub-steps and write the report of `begin`: their fields, and those known before."""
    started = time.perf_counter()
    report: dict[str, Any] = {**night.known_fields, **night.further_input.report_fields}
    unchanged = demand_unchanged_sources(sources_digest, night.input_files.all_files)
    with unchanged, ThreadPoolExecutor(1, "bundle") as bundle_executor:
        night.bundle_pinning = bundle_executor.submit(pin_bundle, night.build, night.bundle)
        for sub_step in READING:
            report |= sub_step.run_sub_step(night)
        night.bundle_pinning.result()
    for sub_step in AFTER_READING:
        report |= sub_step.run_sub_step(night)
    report["seconds"] = time.perf_counter() - started
    night.build.report(BEGIN_REPORT, cast(BeginReport, report))


def _read_event_values(night: BegunNight) -> EventValueFields:
    build, config = night.build, night.build.config
    night.event_values = values = night.further_input.values(
        config, night.bundle, night.erased_entities, night.unusable_rows, data_until_of(build.generation)
    )
    night.fingerprint_files = [
        write_marks(build.root, "user", values.user_values), write_marks(build.root, "item", values.item_values),
    ] if config.events.enabled else []  # fmt: skip
    return {"user_values": values.user_values_digest}


def _write_items(night: BegunNight) -> ItemFields:
    build, values = night.build, night.event_values
    night.catalogue_fields, night.item_columns = lay_out_items(
        build.config, night.bundle, build.root, erased=night.erased_entities.items, unusable=night.unusable_rows,
        prior=night.prior, values_by_item=values.item_values, event_item_ids=values.event_item_ids,
    )  # fmt: skip
    night.items = catalogue.open_items(build.root, night.catalogue_fields)
    unlisted_mask = night.items.ordinals_of(list(values.unlisted_item_ids)) >= 0
    return {**night.catalogue_fields, "unlisted_items": int(unlisted_mask.sum())}


def _write_attributes(night: BegunNight) -> AttributeFields:
    build = night.build
    for write_attributes in item_attribute_writers():
        night.files_by_attribute |= write_attributes(
            build.config, night.items, build.root, night.event_values.item_attribute_values, night.unusable_rows
        )
    return {"attributes": night.files_by_attribute}


def _partition_users(night: BegunNight) -> UserFields:
    config, bundle, prior = night.build.config, night.bundle, night.prior
    night_input = NightInput(
        config, night.items, parse_time(night.cut_text) if night.cut_text else None, night.erased_entities,
        night.input_files.interaction_files, night.known_fields["inputs"], night.further_input, night.event_values,
    )  # fmt: skip
    prior_partition, full_read_reason = prior.partition(night_input)
    night.partition_result = partition_result = PartitionJob(
        night_input,
        night.build.root / "work/partition",
        feature_inputs=catalogue.feature_inputs(bundle, "user"),
        columns_of_lists=bundle.columns_of_lists,
        vector_dims=bundle.dims,
        needs_history=bundle.needs_history,
        holdout=night.holdout,
        report_row_count=night.report_rows_read,
    ).run(prior_partition)
    interaction_counts = partition_result.interaction_counts
    computes_feature_only = _computes_feature_only_users(config, bundle, partition_result)
    answers_feature_only = computes_feature_only or not bundle.needs_history
    return {
        "user_seed": partition_result.hash_seed,
        "users": partition_result.user_count
        - (0 if answers_feature_only else partition_result.feature_only_user_count),
        "featured": partition_result.feature_only_user_count,
        FEATURE_ONLY_USERS_FACT: computes_feature_only,
        "answers_without_history": bundle.answers_without_history,
        "interactions": interaction_counts.interaction_count,
        "unknown_items": interaction_counts.unknown_item_interactions,
        "late": interaction_counts.late_interaction_count,
        "oldest_late_us": interaction_counts.oldest_late_us,
        "unusable": merge_reports([night.unusable_rows.to_json(), partition_result.unusable]),
        "base": {
            **prior.prior_entry,
            "took_over": partition_result.took_over_earlier,
            "read_because": full_read_reason,
        },
        "rows": interaction_counts.row_counts.to_json(),
    }


def _gather_remarks(night: BegunNight) -> RemarkFields:
    config, bundle, cut, facts = night.build.config, night.bundle, night.cut_text, night.known_fields
    items, partition_result, input_files = night.items, night.partition_result, night.input_files
    if not partition_result.user_count:
        raise ConfigError("the sources name no entity: check sources.interactions")
    if config.sources.interactions:
        demand_enough_ids(partition_result.user_count, items.count)
    list_tables = [table for table in config.tables.values() if table.kind != "value"]
    all_remarks = [*night.early_remarks, *_remarks_on_ineffective_cut(night)]
    if list_tables or config.sources.interactions:
        all_remarks += plausibility_remarks(_data_shape(partition_result, items.count))
    all_remarks += [*bundle.training.get("remarks", []), *_remarks_on_late_training(bundle, cut)]
    unknown_remarks = _remarks_on_unknown_items(config, partition_result, items)
    all_remarks += unknown_remarks
    if table := config.sources.item_features:
        all_remarks += items_without_vector_remarks(items.count, night.catalogue_fields["items_without_vector"], table)
    all_remarks += copies_remarks(facts["inputs"][: len(input_files.interaction_files)])
    remark_fields: RemarkFields = {"remarks": all_remarks}
    if unknown_remarks:
        remark_fields[UNKNOWN_ITEMS_NAMED_FIELD] = list(partition_result.interaction_counts.unknown_item_examples)
    return remark_fields


def _write_defaults(night: BegunNight) -> FacetFields:
    if not night.counts_clicks:
        return {}
    popularity = night.partition_result.interaction_counts.interactions_by_item
    popular_items = partial(catalogue.most_popular_items, night.items, popularity)
    write_defaults(night.build, night.bundle, lambda table: popular_items(table.k))
    scores = compute_popularity_scores(popularity)
    report: FacetFields = {}
    for write_tables in score_table_writers():
        report |= write_tables(night.build, night.files_by_attribute, night.items, scores)
    return report


def _finish_files(night: BegunNight) -> FileFields:
    build, bundle, partition_result = night.build, night.bundle, night.partition_result
    shards, bundle_files = build.config.shards, night.bundle_pinning.result()
    has_user_vectors = build.config.sources.user_vectors is not None
    kept_files = [
        *write_count_files(build.root, partition_result.interaction_counts),
        *item_digests_paths(bundle),
        *partition_file_paths(has_user_vectors, shards),
    ]
    touched_files = [f"work/partition/{shard:04d}.{TOUCHED_KIND}" for shard in range(shards)]
    build.finish(
        catalogue.ITEM_IDS_FILE, catalogue.ITEM_OFFSETS_FILE, catalogue.MODEL_INDEX_FILE,
        *([DEFAULTS] if night.counts_clicks else []),
        *sorted({name for model in bundle.models for _, name, _ in model.files}),
        *(catalogue.directory_file_path("item", shard) for shard in range(shards)),
        *kept_files,
        *(touched_files if partition_result.took_over_earlier else []),
        *([night.item_columns] if night.item_columns else []),
        *attribute_paths(night.files_by_attribute), *night.fingerprint_files,
        night.holdout.write(build.root),
        *(f"bundle/{name}" for name in bundle_files),
    )  # fmt: skip
    return {
        "user_vectors": has_user_vectors, "bundle_files": bundle_files,
        "kept": {
            artefact.path: {"size_bytes": artefact.size_bytes, "sha256": artefact.sha256}
            for artefact in map(build.describe, kept_files)
        },
    }  # fmt: skip


class SubStep(NamedTuple):
    """Part of `begin`, with the class of its report fields."""

    sub_step_name: str
    run_sub_step: Callable[[BegunNight], Mapping[str, Any]]
    report_fields_class: type


READING: Final = (
    SubStep("values set by events", _read_event_values, EventValueFields),
    SubStep("items", _write_items, ItemFields),
    SubStep("attributes of items", _write_attributes, AttributeFields),
    SubStep("users by shard", _partition_users, UserFields),
)
"""Sub-steps in order, during which no source file may change; the bundle is copied in parallel."""

AFTER_READING: Final = (
    SubStep("remarks on the figures", _gather_remarks, RemarkFields),
    SubStep("defaults by clicks", _write_defaults, FacetFields),
    SubStep("files for the other steps", _finish_files, FileFields),
)
"""Sub-steps after `READING`."""


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    cut = night.data_until or night.config.data_until or night.run_after
    events_until, taken_events_text = events_before_begin()(night.config, cut)
    begun_build = run(
        night.config, data_until=night.data_until, run_after=night.run_after, named=night.named,
        events_until=events_until, progress=night.progress,
    )  # fmt: skip
    generation, notes_text = (begun_build["generation"], f"\n{taken_events_text}" if taken_events_text else "")
    if begun_build["already_live"]:
        live_text = begun_build.get("nothing_newer") or f"{generation} is live already"
        return StepRow(begun_build, f"{live_text}{notes_text}")
    begin_report = Build.of(night.config, begun_build).need_report(BEGIN_REPORT)
    remarks_text = "".join(remark(begin_report, night.config) for remark in remarks_on_begin())
    notes_text = remarks_text + _describe_feature_only_users(begin_report) + notes_text
    remark_lines = "".join(f"\nnote: {remark}" for remark in begin_report.get("remarks", []))
    return StepRow(begun_build, f"{generation} ({_describe_rows_read(begin_report)}){notes_text}{remark_lines}")


@contextmanager
def demand_unchanged_sources(sources_digest: str, source_files: Sequence[SourceFile]) -> Iterator[None]:
    """Raise StoreError if one of the files changed during the block, even if it could be read.

    Files that arrive meanwhile do not count: they are for the next night.
    """
    with explain_changed_sources(sources_digest, source_files):
        yield
    if not _are_sources_unchanged(sources_digest, source_files):
        raise _sources_changed_error()


@contextmanager
def explain_changed_sources(sources_digest: str, source_files: Sequence[SourceFile]) -> Iterator[None]:
    """Raise StoreError in place of an error in the block if files changed meanwhile, since a retry may succeed."""
    try:
        yield
    except (SourceError, Refused, StoreError) as error:  # a file that is being overwritten looks damaged
        if _are_sources_unchanged(sources_digest, source_files):
            raise
        raise _sources_changed_error() from error


def _are_sources_unchanged(sources_digest: str, source_files: Sequence[SourceFile]) -> bool:
    try:
        return digest_files(source_files)[0] == sources_digest
    except (SourceError, OSError):
        return False


def _sources_changed_error() -> StoreError:
    return StoreError("the source files changed while the night read them; run the night again")


def pin_bundle(build: Build, bundle: Bundle) -> list[str]:
    """Copy a bundle into the generation, its models also under their own names, and try the models.

    Returns the bundle's files, sorted; raises BundleError for a model that differs from the bundle's description.
    """
    for model in bundle.models:
        for source_path, name, _ in model.files:
            link_or_copy_file(source_path, build.path(name))
    # Tried at the paths of later steps: a model that cannot be opened fails here, not hours later.
    bundle.try_models(lambda model: build.path(f"models/{model.name}.fp32.onnx"))
    bundle_file_names = sorted(
        path.relative_to(bundle.path).as_posix() for path in bundle.path.rglob("*") if path.is_file()
    )
    for name in bundle_file_names:
        link_or_copy_file(bundle.path / name, build.path(f"bundle/{name}"))
    return bundle_file_names


def _describe_feature_only_users(begin_report: BeginReport) -> str:
    """Describe the users that only the feature table names and that get no records; empty if there are none."""
    feature_only_count = begin_report.get("featured", 0)
    if not feature_only_count or begin_report[FEATURE_ONLY_USERS_FACT] or not begin_report["answers_without_history"]:
        return ""
    other_user_count = begin_report["users"]
    return (
        f"\n{feature_only_count:,} users of the feature table alone get no records, beside {other_user_count:,} others"
        " (featured_users = true computes them)"
    )


def _computes_feature_only_users(config: NightConfig, bundle: Bundle, partition_result: PartitionResult) -> bool:
    """True if users that only the feature table names are computed, by a model that also takes histories."""
    if not bundle.answers_without_history:
        return False
    if config.featured_users == "auto":
        other_user_count = partition_result.user_count - partition_result.feature_only_user_count
        return not other_user_count or partition_result.feature_only_user_count <= other_user_count
    return config.featured_users


def _describe_rows_read(begin_report: BeginReport) -> str:
    """Describe how many interactions were read, and which rows were left out."""
    source_names = (INTERACTIONS_SOURCE, EVENT_INTERACTIONS_SOURCE)
    source_reports = [begin_report["unusable"][name] for name in source_names if name in begin_report["unusable"]]
    all_remarks = [
        remark for source_report in begin_report["unusable"].values() for remark in source_report.get("remarks", ())
    ]
    if not source_reports:
        return "; ".join(["no interactions", *all_remarks])
    reasons = ", ".join(
        f"{reason_report['rows']:,} {reason}"
        for source_report in source_reports
        for reason, reason_report in source_report["reasons"].items()
    )
    row_count = sum(source_report["rows"] for source_report in source_reports)
    summary = f"{begin_report['interactions']:,} interactions of {row_count:,} rows"
    summary = f"{summary}; left out: {reasons}" if reasons else summary
    return "; ".join([summary, *all_remarks])


def _data_shape(partition_result: PartitionResult, item_count: int) -> InteractionFigures:
    """Return the figures of all rows that were read, without ids, since reports outlive an erasure."""
    interaction_counts, row_counts = (
        partition_result.interaction_counts,
        partition_result.interaction_counts.row_counts,
    )
    named_item_count = int((interaction_counts.interactions_by_item > 0).sum()) + len(
        interaction_counts.unknown_item_hashes
    )
    return InteractionFigures(
        row_count=int(row_counts.rows_by_user_bucket.sum()),
        user_count=partition_result.user_count,
        item_count=named_item_count if interaction_counts.interaction_count else item_count,
        most_rows_of_user=int(row_counts.rows_by_user_bucket.max(initial=0)),
        most_rows_of_item=int(interaction_counts.interactions_by_item.max(initial=0)),
        untimed_row_count=row_counts.untimed_row_count,
        newest_time_us=row_counts.newest_time_us,
        row_count_before_1980=row_counts.row_count_before_1980,
    )


def _remarks_on_ineffective_cut(night: BegunNight) -> list[str]:
    """Return a remark if there is a cut but no interaction has a time."""
    interaction_counts = night.partition_result.interaction_counts
    if (
        night.cut_text is None
        or not 0 < interaction_counts.row_counts.untimed_row_count == interaction_counts.interaction_count
        or interaction_counts.late_interaction_count
    ):
        return []
    remark = (
        f"the cut {night.cut_text} leaves no interaction out, since none has a time: name the column of times "
        "in [sources] "
        "timestamp_column if there is one"
    )
    return [remark]


def _remarks_on_unknown_items(config: NightConfig, partition_result: PartitionResult, items: ItemTable) -> list[str]:
    """Return a remark if many interactions have items that the catalogue lacks."""
    interaction_counts = partition_result.interaction_counts
    event_report = partition_result.unusable.get(EVENT_INTERACTIONS_SOURCE)
    event_row_count = 0 if event_report is None else event_report["rows"]
    unknown_share = unknown_item_share(
        interaction_counts.interaction_count, interaction_counts.unknown_item_interactions, event_row_count
    )
    known_ids = items.ids_of(np.arange(min(UNKNOWN_EXAMPLES_MAX, items.count), dtype=np.uint32))
    catalogue_name = catalogue_in_words(config.sources)
    return unknown_ids_remarks(
        unknown_share, "item", catalogue_name, interaction_counts.unknown_item_examples, known_ids
    )


def _remarks_on_late_training(bundle: Bundle, cut: str | None) -> list[str]:
    """Return a remark if the model was trained on interactions after the cut, by which gates judge the night."""
    trained_until = bundle.training.get("trained_until")
    if cut is None or trained_until is None or parse_time(trained_until) < parse_time(cut):
        return []
    remark = (
        f"the model was trained on interactions up to {trained_until}, but `heldout_recall` judges by those after "
        f"{cut}, so "
        f"the recall is too high: train it with `larder train --data-until {cut}`"
    )
    return [remark]
