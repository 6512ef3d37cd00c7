"""Verifying a generation: its files and its gates, then refused or fit to be published."""

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
from precompute.builds.build import (Build, fetch_partition, read_erased_entities, with_host_copies)
from precompute.builds.reports import (BEGIN_REPORT, BuildId, LOAD_REPORT, VERIFY_REPORT)
from precompute.builds.seal import (write_manifest)
from precompute.bulk.governor import open_governor
from precompute.bulk.headroom import ArmRoom
from precompute.bulk.load import total_bytes
from precompute.bulk.reload import damaged
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import allowed_by_manifest, facts, rooms, scoring_hooks
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
from precompute.partitions.marks import (marks_file_path)
from precompute.releases import moves
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.replication import VerifyReport, run_ids
from precompute.releases.sweep import take_back
from precompute.sources.plausibility import few_in_words
from precompute.steps import load
from precompute.steps.night import Night, StepRow


class VerifyResult(TypedDict):
    """Result of the step: number of gates, and the rules not judged and left out; `not_run`: why there are no gates."""

    generation: str
    gates: int
    verified: bool
    not_judged: NotRequired[list[str]]
    gates_left_out: NotRequired[list[str]]
    remarks: NotRequired[list[str]]
    not_run: NotRequired[str]


@with_host_copies
def run(
    config: NightConfig,
    build: BuildId,
    *,
    attempt: str = "shell",
    progress: Progress = quiet,
) -> VerifyResult:
    """Run every gate; a failed one refuses the generation for good, with a recorded reason.

    Raises NotJudged, and leaves the generation unchanged, if a dependency of a gate did not answer.
    """
    generation_build, started = Build.of(config, build), time.perf_counter()
    manifest = write_manifest(generation_build, facts())
    with open_releases(config) as releases:
        ledger = releases.ledger()
        state = releases.state(generation_build.generation, ledger)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return _published(generation_build, releases, state)
        releases.demand_agreement()
        if state in (None, GenerationState.BEGUN):  # Redis lost what `load` did, and perhaps was restored
            load.run(config, build)
            state = releases.state(generation_build.generation)
        demand_allowed("verify", generation_build.generation, state)
        # Before any page is read back: a node that starts while the gates run counts as changed.
        nodes = run_ids(releases.control.client)
        judged_verdicts = _judged(generation_build, manifest, releases, ledger.live_generation, progress)
        verdicts = apply_overrides(
            judged_verdicts, ledger.overrides_by_generation.get(generation_build.generation, {})
        )
        # It may have gone live, or have been retired, while the gates ran: its manifest is then as released.
        _demand_still(generation_build, releases)
        left_out = [gate.rule for gate in GATES if gate not in applicable_gates(manifest)]
        unasked = {"gates_left_out": left_out} if left_out else {}
        manifest = replace(
            manifest,
            facts={**manifest.facts, **unasked},
            gates=tuple(verdict.to_json() for verdict in verdicts),
            timings={
                **manifest.timings,
                **(
                    {"load": loaded["seconds"]}
                    if (loaded := generation_build.read_report(LOAD_REPORT))
                    else {}
                ),
                "verify": time.perf_counter() - started,
            },
        )
        path = generation_path(generation_build.generation, "manifest.json")
        if failed := [verdict for verdict in verdicts if not verdict.passed]:
            reasons = "; ".join(reason(generation_build.generation, verdict) for verdict in failed)
            if few_ids_remark := few_in_words(manifest.facts["users_in_source"], _listed(manifest)):
                reasons = f"{few_ids_remark}: {reasons}"
            # Refused before its verdicts are to be read: whatever dies in between, nobody publishes it.
            moves.refuse(releases, generation_build.generation, reason=reasons, attempt=attempt)
            generation_build.store.write(path, manifest.to_bytes())
            raise Refused(
                f"{generation_build.generation} is refused, the live generation stays: {reasons}",
                rule=failed[0].rule, value=failed[0].value, threshold=failed[0].threshold,
            )  # fmt: skip
        # The verdicts first: their baseline says nothing of older ones.
        generation_build.store.write(path, manifest.to_bytes())
        report = VerifyReport(run_ids=nodes, baseline=ledger.live_generation)
        generation_build.report(VERIFY_REPORT, report)
        releases.mark_verified(generation_build.generation, attempt=attempt)
    odd = [verdict.note for verdict in verdicts if CLICKS_BY_CHANCE_NOTE in verdict.note]
    live = None if ledger.live_generation is None else _read_manifest(generation_build, ledger.live_generation)
    if live is not None:
        odd += changed_labels_in_words(manifest, live)
    result: VerifyResult = {
        "generation": generation_build.generation, "gates": len(manifest.gates), "verified": True,
        "not_judged": [verdict.rule for verdict in verdicts if not verdict.is_judged],
    }  # fmt: skip
    if left_out:
        result["gates_left_out"] = left_out
    if odd:
        result["remarks"] = odd
    return result


def _listed(manifest: Manifest) -> int | None:
    """Number of items that lists are made of; None if there are no lists, whose items may be a classifier's labels."""
    has_lists = any(table.kind == "topk" for table in manifest.tables.values())
    return manifest.entity_sets["item"].count if has_lists else None


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, night.build, attempt=night.attempt, progress=night.progress)
    left_out = ", ".join(result.get("gates_left_out", ()))
    left_out_note = f"; left out, for there are no interactions: {left_out}" if left_out else ""
    odd = "".join(f"\nnote: {remark}" for remark in result.get("remarks", ()))
    not_judged = result.get("not_judged", ())
    passed = f"{result['gates'] - len(not_judged)} gates passed"
    if not_judged:
        passed += f", {len(not_judged)} not judged"
    return StepRow(result, f"{passed}{left_out_note}{odd}")


def _demand_still(build: Build, releases: Releases) -> None:
    """Raise Conflict if it can no longer be verified; remove pages that a gate may have loaded of a retired one."""
    try:
        demand_allowed("verify", build.generation, releases.state(build.generation))
    except Conflict:
        with open_governor(build.config.governor, releases.control) as governor:
            take_back(releases, build.generation, governor=governor)
        raise


def _published(build: Build, releases: Releases, state: GenerationState) -> VerifyResult:
    """Judge a generation to be published by its gates; of a live one read the pages back. Raise CorruptArtefact."""
    result: VerifyResult = {
        "generation": build.generation,
        "gates": 0,
        "verified": state is GenerationState.LIVE,
    }
    if state is not GenerationState.LIVE:
        return {**result, "not_run": f"it is {state}: a roll back to it reads its pages back"}
    with open_governor(build.config.governor, releases.control) as governor:
        damaged_pages = damaged(
            releases.control, releases.store, build.generation, governor=governor
        )
    if damaged_pages:
        raise CorruptArtefact(
            f"{build.generation} is live, and {len(damaged_pages)} of its pages in Redis are not as stored "
            f"({damaged_pages[0]} is one): "
            "run `larder restore`, which repairs them",
            pages=damaged_pages,
        )
    return {**result, "not_run": "it is live: gates were not run, every page was read back"}


def reason(generation: str, verdict: Verdict) -> str:
    """A failed verdict in words, with what would let it pass."""
    compared = f" (compared with {verdict.baseline})" if verdict.baseline else ""
    finding = f"{verdict.rule} is {verdict.value}, the threshold {verdict.threshold}{compared} {verdict.note}"
    if verdict.rule in INTEGRITY_RULES:
        return f"{finding.strip()}: this rule protects integrity and cannot be overridden"
    return (
        f"{finding.strip()}: if it is right all the same, run `larder override {generation} "
        f'--rule {verdict.rule} --reason "..."`, then `larder verify {generation}`'
    )


def _judged(
    build: Build, manifest: Manifest, releases: Releases, live: str | None, progress: Progress
) -> Sequence[Verdict]:
    """Return verdicts, files first: no other gate can open a file that differs from the manifest."""
    started = time.monotonic()
    artefacts = [*manifest.artefacts(), *manifest.pages()]
    size_bytes = sum(artefact.size_bytes for artefact in artefacts)
    limits = TimeLimits.of(build.config.gates, build.config.governor, size_bytes)
    limit_s = min(limits.gate_s, limits.total_s)
    verdicts = [
        run_within(
            FILES_RULE, lambda: check_files(build.store, build.generation, artefacts), limit_s
        )
    ]
    if not verdicts[0].passed:
        return verdicts
    opened: list[Candidate] = []
    pages_bytes = _pages_bytes(build, releases)

    def opens() -> Measurement:
        try:
            candidate, missing = _candidate(build, manifest, releases, live, pages_bytes)
        except LarderError:
            raise
        except Exception as error:
            if is_unanswered(error):
                raise
            # Whether it can be opened is what this rule asks.
            return Measurement(False, f"{type(error).__name__}: {error}", "readable")
        opened.append(candidate)
        note = "the manifest of the live generation cannot be read" if missing else ""
        return Measurement(not missing, live, "readable", note)

    open_verdict = run_within(OPENS_RULE, opens, limit_s)
    if not opened:
        return [*verdicts, open_verdict]
    verdicts.append(replace(open_verdict, rule=LIVE_FILES_RULE))
    limits = replace(limits, total_s=limits.total_s - (time.monotonic() - started))
    try:
        gates = applicable_gates(manifest)
        for number, verdict in enumerate(run_gates(opened[0], gates, limits=limits), 1):
            verdicts.append(verdict)
            progress("verify", number, len(gates))
    except GateRaised:
        if all(verdict.passed for verdict in verdicts):
            raise
    except NotJudged:
        # What is wrong stays wrong, whatever did not answer: gates behind it may have choked on just that.
        if all(verdict.passed for verdict in verdicts if verdict.rule in INTEGRITY_RULES):
            raise
    return verdicts


def _candidate(
    build: Build, manifest: Manifest, releases: Releases, live: str | None, pages_bytes: int
) -> tuple[Candidate, bool]:
    """The candidate, and whether a live generation there should be cannot be compared with."""
    # What is missing of the night's own notes is missed by the gates that look at it.
    for shard in sampled_shards(manifest.entity_sets["user"]):
        with _if_there():
            fetch_partition(build, shard)
    for name in (holdout.HOLDOUT_FILE, catalogue.ITEM_FEATURES_FILE, marks_file_path("user")):
        with _if_there():
            build.fetch(name)
    with _if_there():
        for name in build.need_report(BEGIN_REPORT)["bundle_files"]:
            build.fetch(f"bundle/{name}")
    live_manifest = None if live is None else _read_manifest(build, live)
    live_root = None
    if live_manifest is not None:
        with _if_there():
            items = live_manifest.items
            parts = [
                part.file
                for entity_set in live_manifest.entity_sets.values()
                for part in entity_set.parts
            ]
            for artefact in (items.ids, items.offsets, items.model_index, items.vectors, *parts):
                fetch_checked(build.store, live_manifest.generation, artefact)
            live_root = build.store.local(generation_path(live_manifest.generation))
    arms: tuple[ArmRoom, ...] = ()
    with _if_there():
        arms = tuple(
            room
            for rooms_beside in rooms()
            for room in rooms_beside(build.config, releases.control.client)
        )
    candidate = Candidate(
        manifest, build.root, ItemTable.open(build.root, manifest), releases.control, live_manifest,
        build.config.gates, build.config.history_limit, live_root, pages_bytes,
        read_erased_entities(build), build.config.governor,
        unreadable_live=live if live_manifest is None else None, superseded_count=build.config.keep,
        arms=arms, allowed_items=allowed_by_manifest(), scoring_hooks=scoring_hooks(), build=build,
    )  # fmt: skip
    return candidate, live is not None and live_manifest is None


def _read_manifest(build: Build, generation: str) -> Manifest | None:
    with _if_there():
        raw = build.store.read(generation_path(generation, "manifest.json"))
        return None if raw is None else Manifest.from_bytes(raw)
    return None


@contextmanager
def _if_there() -> Iterator[None]:
    """Go on without missing or damaged files; raise if the store does not answer, which proves nothing."""
    try:
        yield
    except LarderError as error:
        if is_unanswered(error):
            raise


def _pages_bytes(build: Build, releases: Releases) -> int:
    """Payload of all generations of which Redis may hold pages."""
    manifests = [
        _read_manifest(build, generation)
        for generation, row in releases.control.rows().items()
        if row.state is not GenerationState.RETIRED
    ]
    return sum(total_bytes(manifest) for manifest in manifests if manifest is not None)
