"""Step `verify`: runs the gates over a generation, which is then refused or may be published."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NotRequired, TypedDict

from cache.control.states import GenerationState, demand_allowed
from cache.errors import Conflict, CorruptArtefact, LarderError, NotJudged, Refused
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.store.artefacts import fetch_checked, generation_path
from precompute.builds.build import Build, fetch_partition, read_erased_entities, with_host_copies
from precompute.builds.reports import BEGIN_REPORT, LOAD_REPORT, VERIFY_REPORT, BuildId
from precompute.builds.seal import write_manifest
from precompute.bulk.governor import open_governor
from precompute.bulk.headroom import ArmRoom
from precompute.bulk.load import total_bytes
from precompute.bulk.reload import find_damaged_pages
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import allowed_item_masks, arm_room_functions, fact_functions, scoring_hooks
from precompute.gates.evidence.candidate import Candidate, Measurement, Verdict
from precompute.gates.evidence.user_sample import sampled_shards
from precompute.gates.judge import (
    FILES_RULE,
    GATES,
    INTEGRITY_RULES,
    LIVE_FILES_RULE,
    OPENS_RULE,
    GateRaised,
    TimeLimits,
    applicable_gates,
    apply_overrides,
    is_unanswered,
    run_gates,
    run_within,
)
from precompute.gates.rules.checksums import check_files
from precompute.gates.rules.live import CLICKS_BY_CHANCE_NOTE, changed_labels_in_words
from precompute.partitions import catalogue, holdout
from precompute.partitions.marks import marks_file_path
from precompute.releases import moves
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.replication import VerifyReport, run_ids
from precompute.releases.sweep import unlink_if_retired
from precompute.sources.plausibility import few_in_words
from precompute.steps import load
from precompute.steps.night import Night, StepRow


class VerifyResult(TypedDict):
    """Result of the step: number of gates, rules not judged, rules left out; `not_run`: why no gate ran."""

    generation: str
    gates: int
    verified: bool
    not_judged: NotRequired[list[str]]
    gates_left_out: NotRequired[list[str]]
    remarks: NotRequired[list[str]]
    not_run: NotRequired[str]


@with_host_copies
def run(config: NightConfig, build: BuildId, *, attempt: str = "shell", progress: Progress = quiet) -> VerifyResult:
    """Run every gate; a failed gate refuses the generation, with a recorded reason.

    Raises NotJudged, and leaves the generation unchanged, if a dependency of a gate did not answer.
    """
    generation_build, started = Build.of(config, build), time.perf_counter()
    manifest = write_manifest(generation_build, fact_functions())
    with open_releases(config) as releases:
        ledger = releases.ledger()
        state = releases.state(generation_build.generation, ledger)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return _verify_published(generation_build, releases, state)
        releases.demand_agreement()
        if state in (None, GenerationState.BEGUN):  # Redis lost the loaded pages; it may have been restored since
            load.run(config, build)
            state = releases.state(generation_build.generation)
        demand_allowed("verify", generation_build.generation, state)
        # Read before any page is read back: a node that restarts while the gates run then counts as changed.
        run_id_by_node = run_ids(releases.control.client)
        judged_verdicts = _judge(generation_build, manifest, releases, ledger.live_generation, progress)
        verdicts = apply_overrides(judged_verdicts, ledger.overrides_by_generation.get(generation_build.generation, {}))
        # If it went live or was retired while the gates ran, its manifest must stay as released.
        state = releases.state(generation_build.generation)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):  # by another night of the same inputs
            return _verify_published(generation_build, releases, state)
        _demand_verifiable(generation_build, releases)
        left_out_rules = [gate.rule for gate in GATES if gate not in applicable_gates(manifest)]
        left_out_fact = {"gates_left_out": left_out_rules} if left_out_rules else {}
        manifest = replace(
            manifest,
            facts={**manifest.facts, **left_out_fact},
            gates=tuple(verdict.to_json() for verdict in verdicts),
            timings={
                **manifest.timings,
                **(
                    {"load": load_report["seconds"]}
                    if (load_report := generation_build.read_report(LOAD_REPORT))
                    else {}
                ),
                "verify": time.perf_counter() - started,
            },
        )
        manifest_path = generation_path(generation_build.generation, "manifest.json")
        if failed_verdicts := [verdict for verdict in verdicts if not verdict.passed]:
            failure_text = "; ".join(
                failure_reason(generation_build.generation, verdict) for verdict in failed_verdicts
            )
            if few_ids_remark := few_in_words(manifest.facts["users_in_source"], _listed_item_count(manifest)):
                failure_text = f"{few_ids_remark}: {failure_text}"
            # Refused before its verdicts are written: then no crash in between lets it be published.
            moves.refuse(releases, generation_build.generation, reason=failure_text, attempt=attempt)
            generation_build.store.write(manifest_path, manifest.to_bytes())
            raise Refused(
                f"{generation_build.generation} is refused, the live generation stays: {failure_text}",
                rule=failed_verdicts[0].rule, value=failed_verdicts[0].measured_value,
                threshold=failed_verdicts[0].threshold,
            )  # fmt: skip
        # Written before the baseline, which must not be combined with older verdicts.
        generation_build.store.write(manifest_path, manifest.to_bytes())
        report = VerifyReport(run_ids=run_id_by_node, baseline=ledger.live_generation)
        generation_build.report(VERIFY_REPORT, report)
        releases.mark_verified(generation_build.generation, attempt=attempt)
    remarks = [verdict.note for verdict in verdicts if CLICKS_BY_CHANCE_NOTE in verdict.note]
    live_manifest = (
        None if ledger.live_generation is None else _manifest_if_readable(generation_build, ledger.live_generation)
    )
    if live_manifest is not None:
        remarks += changed_labels_in_words(manifest, live_manifest)
    result: VerifyResult = {
        "generation": generation_build.generation, "gates": len(manifest.gates), "verified": True,
        "not_judged": [verdict.rule for verdict in verdicts if not verdict.is_judged],
    }  # fmt: skip
    if left_out_rules:
        result["gates_left_out"] = left_out_rules
    if remarks:
        result["remarks"] = remarks
    return result


def _listed_item_count(manifest: Manifest) -> int | None:
    """Return the number of items in lists; None without lists, when items may be a classifier's labels."""
    has_lists = any(table.kind == "topk" for table in manifest.tables.values())
    return manifest.entity_sets["item"].count if has_lists else None


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, night.build, attempt=night.attempt, progress=night.progress)
    left_out_text = ", ".join(result.get("gates_left_out", ()))
    left_out_note = f"; left out, since there are no interactions: {left_out_text}" if left_out_text else ""
    remark_lines = "".join(f"\nnote: {remark}" for remark in result.get("remarks", ()))
    unjudged_rules = result.get("not_judged", ())
    gates_text = f"{result['gates'] - len(unjudged_rules)} gates passed"
    if unjudged_rules:
        gates_text += f", {len(unjudged_rules)} not judged"
    return StepRow(result, f"{gates_text}{left_out_note}{remark_lines}")


def _demand_verifiable(build: Build, releases: Releases) -> None:
    """Raise Conflict if the generation may no longer be verified; remove pages loaded since it was retired."""
    try:
        demand_allowed("verify", build.generation, releases.state(build.generation))
    except Conflict:
        with open_governor(build.config.governor, releases.control) as governor:
            unlink_if_retired(releases, build.generation, governor=governor)
        raise


def _verify_published(build: Build, releases: Releases, state: GenerationState) -> VerifyResult:
    """Return the result for a live or superseded generation; of a live one, read the pages back.

    Raises CorruptArtefact for damaged pages.
    """
    result: VerifyResult = {"generation": build.generation, "gates": 0, "verified": state is GenerationState.LIVE}
    if state is not GenerationState.LIVE:
        return {**result, "not_run": f"it is {state}: a roll back to it reads its pages back"}
    with open_governor(build.config.governor, releases.control) as governor:
        damaged_pages = find_damaged_pages(releases.control, releases.store, build.generation, governor=governor)
    if damaged_pages:
        raise CorruptArtefact(
            f"{build.generation} is live, and {len(damaged_pages)} of its pages in Redis differ from the store "
            f"({damaged_pages[0]} for example): "
            "run `larder restore`, which repairs them",
            pages=damaged_pages,
        )
    return {**result, "not_run": "it is live: no gate was run, but every page was read back"}


def failure_reason(generation: str, verdict: Verdict) -> str:
    """Describe a failed verdict, and what would let the generation pass."""
    baseline_text = f" (compared with {verdict.baseline_generation})" if verdict.baseline_generation else ""
    finding_text = (
        f"{verdict.rule} is {verdict.measured_value}, the threshold {verdict.threshold}{baseline_text} {verdict.note}"
    )
    if verdict.rule in INTEGRITY_RULES:
        return f"{finding_text.strip()}: this rule protects integrity and cannot be overridden"
    return (
        f"{finding_text.strip()}: if the value is acceptable, run `larder override {generation} "
        f'--rule {verdict.rule} --reason "..."`, then `larder verify {generation}`'
    )


def _judge(
    build: Build, manifest: Manifest, releases: Releases, live_generation: str | None, progress: Progress
) -> Sequence[Verdict]:
    """Return the verdicts. Files are judged first: other gates cannot use files that differ from the manifest."""
    started = time.monotonic()
    artefacts = [*manifest.served_artefacts(), *manifest.page_artefacts()]
    size_bytes = sum(artefact.size_bytes for artefact in artefacts)
    time_limits = TimeLimits.of(build.config.gates, build.config.governor, size_bytes)
    limit_s = min(time_limits.gate_s, time_limits.total_s)
    verdicts = [run_within(FILES_RULE, lambda: check_files(build.store, build.generation, artefacts), limit_s)]
    if not verdicts[0].passed:
        return verdicts
    opened_candidates: list[Candidate] = []
    redis_pages_bytes = _redis_pages_bytes(build, releases)

    def measure_opening() -> Measurement:
        try:
            candidate, is_live_unreadable = _open_candidate(
                build, manifest, releases, live_generation, redis_pages_bytes
            )
        except LarderError:
            raise
        except Exception as error:
            if is_unanswered(error):
                raise
            # An error of any kind is what this rule reports.
            return Measurement(False, f"{type(error).__name__}: {error}", "readable")
        opened_candidates.append(candidate)
        note = "the manifest of the live generation cannot be read" if is_live_unreadable else ""
        return Measurement(not is_live_unreadable, live_generation, "readable", note)

    open_verdict = run_within(OPENS_RULE, measure_opening, limit_s)
    if not opened_candidates:
        return [*verdicts, open_verdict]
    verdicts.append(replace(open_verdict, rule=LIVE_FILES_RULE))
    time_limits = replace(time_limits, total_s=time_limits.total_s - (time.monotonic() - started))
    try:
        gates = applicable_gates(manifest)
        for gate_number, verdict in enumerate(run_gates(opened_candidates[0], gates, limits=time_limits), 1):
            verdicts.append(verdict)
            progress("verify", gate_number, len(gates))
    except GateRaised:
        if all(verdict.passed for verdict in verdicts):
            raise
    except NotJudged:
        # A failed integrity rule stands even if something did not answer: its failure may be the reason.
        if all(verdict.passed for verdict in verdicts if verdict.rule in INTEGRITY_RULES):
            raise
    return verdicts


def _open_candidate(
    build: Build, manifest: Manifest, releases: Releases, live_generation: str | None, pages_bytes: int
) -> tuple[Candidate, bool]:
    """Return the candidate, and True if there is a live generation whose manifest cannot be read."""
    # Files of the night that are missing here are reported by the gates that need them.
    for shard in sampled_shards(manifest.entity_sets["user"]):
        with _skip_missing():
            fetch_partition(build, shard)
    for night_file in (holdout.HOLDOUT_FILE, catalogue.ITEM_FEATURES_FILE, marks_file_path("user")):
        with _skip_missing():
            build.fetch(night_file)
    with _skip_missing():
        for night_file in build.need_report(BEGIN_REPORT)["bundle_files"]:
            build.fetch(f"bundle/{night_file}")
    live_manifest = None if live_generation is None else _manifest_if_readable(build, live_generation)
    live_root = None
    if live_manifest is not None:
        with _skip_missing():
            items = live_manifest.items
            directory_files = [
                part.file for entity_set in live_manifest.entity_sets.values() for part in entity_set.parts
            ]
            for artefact in (items.ids, items.offsets, items.model_index, items.vectors, *directory_files):
                fetch_checked(build.store, live_manifest.generation, artefact)
            live_root = build.store.local(generation_path(live_manifest.generation))
    arm_rooms: tuple[ArmRoom, ...] = ()
    with _skip_missing():
        arm_rooms = tuple(
            room
            for rooms_of_feature in arm_room_functions()
            for room in rooms_of_feature(build.config, releases.control.client)
        )
    candidate = Candidate(
        manifest, build.root, ItemTable.open(build.root, manifest), releases.control, live_manifest,
        build.config.gates, build.config.history_limit, live_root, pages_bytes,
        read_erased_entities(build), build.config.governor,
        unreadable_live_generation=live_generation if live_manifest is None else None,
        superseded_count=build.config.keep,
        arm_rooms=arm_rooms, allowed_items=allowed_item_masks(), scoring_hooks=scoring_hooks(), build=build,
    )  # fmt: skip
    return candidate, live_generation is not None and live_manifest is None


def _manifest_if_readable(build: Build, generation: str) -> Manifest | None:
    with _skip_missing():
        raw_manifest = build.store.read(generation_path(generation, "manifest.json"))
        return None if raw_manifest is None else Manifest.from_bytes(raw_manifest)
    return None


@contextmanager
def _skip_missing() -> Iterator[None]:
    """Continue without missing or damaged files; raise if the store does not answer, which proves nothing."""
    try:
        yield
    except LarderError as error:
        if is_unanswered(error):
            raise


def _redis_pages_bytes(build: Build, releases: Releases) -> int:
    """Return the page bytes of all generations whose pages may be in Redis."""
    manifests = [
        _manifest_if_readable(build, generation)
        for generation, row in releases.control.rows().items()
        if row.state is not GenerationState.RETIRED
    ]
    return sum(total_bytes(manifest) for manifest in manifests if manifest is not None)
