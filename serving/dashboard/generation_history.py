"""Generations and nights for the dashboard, from the artefact store: blocking, remembered while nothing changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from cache.config.timetable import NIGHT_STEPS, STEPS_TIMED_APART
from cache.errors import LarderError
from cache.format.manifest import GENERATION_PATTERN, Manifest
from cache.reuse import Reuse
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.night_failure import NightFailure, last_failure
from cache.store.releases import MOVE_ACTIONS, POINTER_ACTIONS, Release, publication_time

GENERATIONS_MAX = 20
NIGHTS_MAX = 7
_OUTCOMES = {
    "live": "published", "superseded": "published", "retired": "published", "rolled_back": "rolled back",
    "refused": "refused", "abandoned": "abandoned", "verified": "verified",
}  # fmt: skip
_AFTER = {"refuse": "refused", "abandon": "abandoned", "retire": "retired", "verify": "verified"}
_BUSY = ("begun", "loaded", "verified")


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """Facts remembered of one generation as of a state; `document_fields`: its size and its gates in the document."""

    state: str | None
    document_fields: Mapping[str, Any]
    began_at: float
    steps: Sequence[Mapping[str, Any]]
    reuse: Mapping[str, Any] | None


_UNKNOWN: Mapping[str, Any] = {
    "data_until": None, "bytes": None, "records": None, "gates": [], "remarks": [], "events_until": None,
}  # fmt: skip


class GenerationHistory:
    """History of generations and nights; `records` gives the release records, or raises. For one thread at a time."""

    def __init__(self, store: ArtefactStore, records: Callable[[], Sequence[Release]]) -> None:
        self._store = store
        self._records = records
        self._facts_by_generation: dict[str, GenerationFacts] = {}

    def read(
        self, registry: Mapping[str, Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return generations and nights, newest first; without a registry states are those of the release records."""
        releases: Sequence[Release] = []
        with suppress(LarderError, OSError, ValueError):
            releases = self._records()
        names = {release.generation for release in releases} | set(registry or ())
        with suppress(LarderError, OSError):
            names |= set(self._store.names("generations"))
        newest_names = sorted(filter(GENERATION_PATTERN.fullmatch, names), reverse=True)[
            :GENERATIONS_MAX
        ]
        self._facts_by_generation = {
            name: facts for name, facts in self._facts_by_generation.items() if name in newest_names
        }
        generations: list[dict[str, Any]] = []
        nights: list[dict[str, Any]] = []
        for name in newest_names:
            state, reason = _state(name, releases, None if registry is None else registry.get(name))
            facts = self._read_facts(name, state)
            generations.append(_generation(name, state, reason, releases, facts))
            if facts is not None and facts.steps and len(nights) < NIGHTS_MAX:
                nights.append(_night(name, state, facts))
        failure = last_failure(self._store)
        if failure is not None and not failure.is_refused:
            nights = _with_failure(nights, failure)
        return generations, nights

    def _read_facts(self, name: str, state: str | None) -> GenerationFacts | None:
        earlier_facts = self._facts_by_generation.get(name)
        if (
            earlier_facts is not None
            and earlier_facts.state == state
            and state not in _BUSY
            and state != "live"
        ):
            return earlier_facts
        try:
            manifest = read_manifest(self._store, name)
        except (LarderError, OSError):
            return earlier_facts
        # Verifying writes gates anew; what is live goes on being warmed for a while.
        facts = self._facts_by_generation[name] = _build_facts(
            state, manifest, list(self._reports(name))
        )
        return facts

    def _reports(self, name: str) -> Iterable[tuple[str, float, float]]:
        for step in STEPS_TIMED_APART:
            with suppress(LarderError, OSError, ValueError, TypeError, KeyError):
                raw = self._store.read(generation_path(name, f"times/{step}.json"))
                if raw is not None:
                    step_times = orjson.loads(raw)
                    yield step, float(step_times["began_at"]), float(step_times["seconds"])


def _build_facts(
    state: str | None, manifest: Manifest, reports: Sequence[tuple[str, float, float]]
) -> GenerationFacts:
    seconds = dict(manifest.timings) | {step: step_seconds for step, _, step_seconds in reports}
    reuse = Reuse.of(manifest.facts)
    before_seal = sum(
        step_seconds for step, step_seconds in manifest.timings.items() if step != "verify"
    )
    return GenerationFacts(
        state,
        {
            "data_until": manifest.data_until,
            "bytes": sum(
                artefact.size_bytes for artefact in (*manifest.artefacts(), *manifest.pages())
            ),
            "records": sum(
                part.count for table in manifest.stored_tables.values() for part in table.parts
            ),
            "gates": [_gate(gate) for gate in manifest.gates],
            "remarks": [str(remark) for remark in manifest.facts.get("remarks", [])],
            "events_until": None if manifest.events is None else manifest.events.until,
        },
        manifest.created_at - before_seal,
        [
            {"step": step, "seconds": round(seconds[step], 3)}
            for step in NIGHT_STEPS
            if step in seconds
        ],
        None if reuse is None else reuse.to_json(),
    )


def _gate(gate: Mapping[str, Any]) -> dict[str, Any]:
    verdict = "passed" if gate.get("passed") else "failed"
    return {
        "rule": str(gate.get("rule")), "value": gate.get("value"), "threshold": gate.get("threshold"),
        "verdict": "overridden" if gate.get("overridden") else verdict, "note": gate.get("note") or None,
    }  # fmt: skip


def _state(
    name: str, releases: Sequence[Release], row: Mapping[str, Any] | None
) -> tuple[str | None, str | None]:
    """Return the state and its reason: the registry's, else those that the records prove."""
    about = [release for release in releases if release.generation == name]
    reason = next((release.reason for release in reversed(about) if release.reason), None)
    if row is not None:
        return str(row.get("state")), str(row["reason"]) if row.get("reason") else reason
    return _proven(releases).get(name), reason


def _proven(releases: Sequence[Release]) -> dict[str, str]:
    """States of generations that release records prove by themselves, oldest record first."""
    states: dict[str, str] = {}
    live: str | None = None
    for release in releases:
        if release.action in POINTER_ACTIONS and not release.is_done:
            continue
        if release.action in MOVE_ACTIONS:
            if live not in (None, release.generation):
                states[str(live)] = "rolled_back" if release.action == "roll_back" else "superseded"
            live = release.generation
            states[live] = "live"
        elif release.action == "end_canary":
            if release.abandoned:
                states[release.generation] = "abandoned"
        elif release.action in _AFTER and release.generation != live:
            states[release.generation] = _AFTER[release.action]
    return states


def _is_move(release: Release) -> bool:
    return release.action in MOVE_ACTIONS and release.is_done


def _generation(
    name: str,
    state: str | None,
    reason: str | None,
    releases: Sequence[Release],
    facts: GenerationFacts | None,
) -> dict[str, Any]:
    """Return a generation's row without its role, which the caller adds, as it knows the held generations."""
    moved = next(
        (
            release
            for release in reversed(releases)
            if release.generation == name and _is_move(release)
        ),
        None,
    )
    return {
        "generation": name,
        "state": state,
        "epoch": None if moved is None else moved.epoch,
        "role": None,
        "published_at": None if moved is None else publication_time(releases, name) or moved.at,
        **(_UNKNOWN if facts is None else facts.document_fields),
        "reason": reason,
    }


def _night(name: str, state: str | None, facts: GenerationFacts) -> dict[str, Any]:
    return {
        "generation": name,
        "outcome": _OUTCOMES.get(state or "", "unfinished"),
        "began_at": facts.began_at,
        "steps": list(facts.steps),
        "reuse": facts.reuse,
        "failure": None,
    }


def _with_failure(nights: list[dict[str, Any]], failure: NightFailure) -> list[dict[str, Any]]:
    """Return the nights with the failed one first; one that failed early has no files, so no times of its steps."""
    failed: dict[str, Any] = {
        "generation": failure.generation or "", "began_at": None, "steps": [], "reuse": None,
    }  # fmt: skip
    others = []
    for night in nights:
        if night["generation"] == failure.generation:
            failed = night
        else:
            others.append(night)
    outcome = {
        "outcome": f"failed in {failure.step}",
        "failure": {"step": failure.step, "at": failure.at, "error": failure.error},
    }
    return [failed | outcome, *others][:NIGHTS_MAX]
