"""Verifying a generation: its files and its gates, then refused or fit to be published."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cache.errors import Conflict, CorruptArtefact, LarderError, NotJudged, Refused
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.store.artefacts import fetch_checked, generation_path
from precompute.builds.build import Build, erased_from, fetch_partition
from precompute.builds.copies import on_this_host
from precompute.builds.night import Night, StepRow
from precompute.builds.seal import seal
from precompute.bulk.governor import open_governor
from precompute.bulk.load import total_bytes
from precompute.bulk.reload import damaged
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.control.states import State, demand
from precompute.events.marks import marks_file
from precompute.experiments.room import ArmRoom, arms_room
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.limits import TimeLimits
from precompute.gates.evidence.user_sample import sampled_shards
from precompute.gates.evidence.verdict import Measured, Verdict
from precompute.gates.judge import (
    FILES,
    GATES,
    INTEGRITY,
    LIVE_FILES,
    OPENS,
    GateRaised,
    asked_of,
    is_unanswered,
    overridden,
    run_gates,
    run_within,
)
from precompute.gates.rules.files import files
from precompute.partitions import catalogue, holdout
from precompute.releases.registry import open_releases
from precompute.releases.release import Releases
from precompute.releases.replication import run_ids
from precompute.releases.sweep import take_back
from precompute.sources.plausibility import few_in_words
from precompute.steps import load


@on_this_host
def run(
    config: NightConfig,
    build: Mapping[str, Any],
    *,
    attempt: str = "shell",
    progress: Progress = quiet,
) -> Step:
    """Run every gate; a failed one refuses the generation for good reason, written down.

    Raises NotJudged, and leaves the generation as it is, where a gate could not ask what it needs.
    """
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    with open_releases(config) as releases:
        ledger = releases.ledger()
        state = releases.state(made.generation, ledger)
        if state in (State.LIVE, State.SUPERSEDED):
            return _published(made, releases, state)
        releases.demand_agreement()
        if state in (None, State.BEGUN):  # Redis lost what `load` did, and perhaps was restored
            load.run(config, build)
            state = releases.state(made.generation)
        demand("verify", made.generation, state)
        # Before any page is read back: a node that starts while the gates run counts as changed.
        nodes = run_ids(releases.control.client)
        found = _judged(made, manifest, releases, ledger.live, progress)
        verdicts = overridden(found, ledger.overrides.get(made.generation, {}))
        # It may have gone live, or have been retired, while the gates ran: its manifest is then as released.
        _demand_still(made, releases)
        left_out = [gate.rule for gate in GATES if gate not in asked_of(manifest)]
        unasked: Step = {"gates_left_out": left_out} if left_out else {}
        manifest = replace(
            manifest,
            facts={**manifest.facts, **unasked},
            gates=tuple(each.to_json() for each in verdicts),
            timings={
                **manifest.timings,
                **({"load": loaded["seconds"]} if (loaded := made.read_report("load")) else {}),
                "verify": time.perf_counter() - started,
            },
        )
        path = generation_path(made.generation, "manifest.json")
        if failed := [each for each in verdicts if not each.passed]:
            reasons = "; ".join(reason(made.generation, each) for each in failed)
            named, items = manifest.facts["users_in_source"], manifest.entity_sets["item"].count
            if few := few_in_words(named, items):
                reasons = f"{few}: {reasons}"
            # Refused before its verdicts are to be read: whatever dies in between, nobody publishes it.
            releases.refuse(made.generation, reason=reasons, attempt=attempt)
            made.store.write(path, manifest.to_bytes())
            raise Refused(
                f"{made.generation} is refused, the live generation stays: {reasons}",
                rule=failed[0].rule, value=failed[0].value, threshold=failed[0].threshold,
            )  # fmt: skip
        # The verdicts first: their baseline says nothing of older ones.
        made.store.write(path, manifest.to_bytes())
        made.report("verified", {"run_ids": nodes, "baseline": ledger.live})
        releases.mark_verified(made.generation, attempt=attempt)
    return {
        "generation": made.generation, "gates": len(manifest.gates), "verified": True, **unasked,
    }  # fmt: skip


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    found = run(night.config, night.build, attempt=night.attempt, progress=night.progress)
    left_out = ", ".join(found.get("gates_left_out", ()))
    told = f"; left out, for there are no interactions: {left_out}" if left_out else ""
    return StepRow(found, f"{found['gates']} gates passed{told}")


def _demand_still(made: Build, releases: Releases) -> None:
    """Raises Conflict if it can no longer be verified; of what is retired by now a gate may have loaded pages."""
    try:
        demand("verify", made.generation, releases.state(made.generation))
    except Conflict:
        with open_governor(made.config.governor, releases.control) as governor:
            take_back(releases, made.generation, governor=governor)
        raise


def _published(made: Build, releases: Releases, state: State) -> Step:
    """Gates judge what is to be published; of what is live the pages are read back. Raises CorruptArtefact."""
    found: Step = {"generation": made.generation, "gates": 0, "verified": state is State.LIVE}
    if state is not State.LIVE:
        return {**found, "not_run": f"it is {state}: a roll back to it reads its pages back"}
    with open_governor(made.config.governor, releases.control) as governor:
        bad = damaged(releases.control, releases.store, made.generation, governor=governor)
    if bad:
        raise CorruptArtefact(
            f"{made.generation} is live, and {len(bad)} of its pages in Redis are not as stored ({bad[0]} is one): "
            "run `larder restore`, which repairs them",
            pages=bad,
        )
    return {**found, "not_run": "it is live: gates were not run, every page was read back"}


def reason(generation: str, verdict: Verdict) -> str:
    """A failed verdict in words, with what would let it pass."""
    compared = f" (compared with {verdict.baseline})" if verdict.baseline else ""
    found = f"{verdict.rule} is {verdict.value}, the threshold {verdict.threshold}{compared} {verdict.note}"
    if verdict.rule in INTEGRITY:
        return f"{found.strip()}: this rule protects integrity and cannot be overridden"
    return (
        f"{found.strip()}: if it is right all the same, run `larder override {generation} "
        f'--rule {verdict.rule} --reason "..."`, then `larder verify {generation}`'
    )


def _judged(
    made: Build, manifest: Manifest, releases: Releases, live: str | None, progress: Progress
) -> Sequence[Verdict]:
    """Verdicts, files first: what is not as the manifest states can be opened by no other gate."""
    started = time.monotonic()
    artefacts = [*manifest.artefacts(), *manifest.pages()]
    size_bytes = sum(each.size_bytes for each in artefacts)
    limits = TimeLimits.of(made.config.gates, made.config.governor, size_bytes)
    limit_s = min(limits.gate_s, limits.total_s)
    verdicts = [run_within(FILES, lambda: files(made.store, made.generation, artefacts), limit_s)]
    if not verdicts[0].passed:
        return verdicts
    opened: list[Candidate] = []
    pages_bytes = _pages_bytes(made, releases)

    def opens() -> Measured:
        try:
            candidate, missing = _candidate(made, manifest, releases, live, pages_bytes)
        except LarderError:
            raise
        except Exception as error:
            if is_unanswered(error):
                raise
            # Whether it can be opened is what this rule asks.
            return Measured(False, f"{type(error).__name__}: {error}", "readable")
        opened.append(candidate)
        note = "the manifest of the live generation cannot be read" if missing else ""
        return Measured(not missing, live, "readable", note)

    found = run_within(OPENS, opens, limit_s)
    if not opened:
        return [*verdicts, found]
    verdicts.append(replace(found, rule=LIVE_FILES))
    limits = replace(limits, total_s=limits.total_s - (time.monotonic() - started))
    try:
        gates = asked_of(manifest)
        for number, each in enumerate(run_gates(opened[0], gates, limits=limits), 1):
            verdicts.append(each)
            progress("verify", number, len(gates))
    except GateRaised:
        if all(each.passed for each in verdicts):
            raise
    except NotJudged:
        # What is wrong stays wrong, whatever did not answer: gates behind it may have choked on just that.
        if all(each.passed for each in verdicts if each.rule in INTEGRITY):
            raise
    return verdicts


def _candidate(
    made: Build, manifest: Manifest, releases: Releases, live: str | None, pages_bytes: int
) -> tuple[Candidate, bool]:
    """The candidate, and whether a live generation there should be cannot be compared with."""
    # What is missing of the night's own notes is missed by the gates that look at it.
    for shard in sampled_shards(manifest.entity_sets["user"]):
        with _if_there():
            fetch_partition(made, shard)
    for name in (holdout.FILE, catalogue.ITEM_FEATURES, marks_file("user")):
        with _if_there():
            made.fetch(name)
    with _if_there():
        for name in made.need("begin")["bundle_files"]:
            made.fetch(f"bundle/{name}")
    before = None if live is None else _read_manifest(made, live)
    live_root = None
    if before is not None:
        with _if_there():
            items = before.items
            parts = [part.file for each in before.entity_sets.values() for part in each.parts]
            for artefact in (items.ids, items.offsets, items.model_index, items.vectors, *parts):
                fetch_checked(made.store, before.generation, artefact)
            live_root = made.store.local(generation_path(before.generation))
    arms: tuple[ArmRoom, ...] = ()
    with _if_there():
        arms = arms_room(made.config, releases.control.client)
    candidate = Candidate(
        manifest, made.root, ItemTable.open(made.root, manifest), releases.control, before,
        made.config.gates, made.config.history_limit, live_root, pages_bytes,
        erased_from(made), made.config.governor,
        unreadable=live if before is None else None, keep=made.config.keep,
        arms=arms, build=made,
    )  # fmt: skip
    return candidate, live is not None and before is None


def _read_manifest(made: Build, generation: str) -> Manifest | None:
    with _if_there():
        raw = made.store.read(generation_path(generation, "manifest.json"))
        return None if raw is None else Manifest.from_bytes(raw)
    return None


@contextmanager
def _if_there() -> Iterator[None]:
    """Goes on without what is missing or damaged; a store that does not answer is raised, it proves nothing."""
    try:
        yield
    except LarderError as error:
        if is_unanswered(error):
            raise


def _pages_bytes(made: Build, releases: Releases) -> int:
    """Payload of all generations of which Redis may hold pages."""
    known = [
        _read_manifest(made, generation)
        for generation, row in releases.control.rows().items()
        if row.state is not State.RETIRED
    ]
    return sum(total_bytes(each) for each in known if each is not None)
