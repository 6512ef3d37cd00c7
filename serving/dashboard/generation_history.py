"""Generations and nights for the dashboard, read from the artefact store; blocking, cached while nothing changes."""

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

SHOWN_GENERATIONS_MAX = 20
SHOWN_NIGHTS_MAX = 7
_OUTCOME_BY_STATE = {
    "live": "published", "superseded": "published", "retired": "published", "rolled_back": "rolled back",
    "refused": "refused", "abandoned": "abandoned", "verified": "verified",
}  # fmt: skip
_STATE_BY_ACTION = {"refuse": "refused", "abandon": "abandoned", "retire": "retired", "verify": "verified"}
_BUSY_STATES = ("begun", "loaded", "verified")


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """Cached facts of one generation in a certain state; `document_fields` are its size and gates in the document."""

    generation_state: str | None
    document_fields: Mapping[str, Any]
    night_began_at: float
    step_rows: Sequence[Mapping[str, Any]]
    reuse_fields: Mapping[str, Any] | None


_UNKNOWN_FIELDS: Mapping[str, Any] = {
    "data_until": None, "bytes": None, "records": None, "gates": [], "remarks": [], "events_until": None,
}  # fmt: skip


class GenerationHistory:
    """History of generations and nights, for one thread at a time; `read_releases` returns all release records."""

    def __init__(self, store: ArtefactStore, read_releases: Callable[[], Sequence[Release]]) -> None:
        self._store = store
        self._read_releases = read_releases
        self._facts_by_generation: dict[str, GenerationFacts] = {}

    def read_generations_and_nights(
        self, registry_row_by_generation: Mapping[str, Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return generations and nights, newest first; without a registry, states come from the release records."""
        releases: Sequence[Release] = []
        with suppress(LarderError, OSError, ValueError):
            releases = self._read_releases()
        generation_names = {release.generation for release in releases} | set(registry_row_by_generation or ())
        with suppress(LarderError, OSError):
            generation_names |= set(self._store.names("generations"))
        newest_names = sorted(filter(GENERATION_PATTERN.fullmatch, generation_names), reverse=True)[
            :SHOWN_GENERATIONS_MAX
        ]
        self._facts_by_generation = {
            name: facts for name, facts in self._facts_by_generation.items() if name in newest_names
        }
        generation_rows: list[dict[str, Any]] = []
        night_rows: list[dict[str, Any]] = []
        for generation_name in newest_names:
            state, reason = _state_and_reason(
                generation_name,
                releases,
                None if registry_row_by_generation is None else registry_row_by_generation.get(generation_name),
            )
            facts = self._read_facts(generation_name, state)
            generation_rows.append(_generation_row(generation_name, state, reason, releases, facts))
            if facts is not None and facts.step_rows and len(night_rows) < SHOWN_NIGHTS_MAX:
                night_rows.append(_night_row(generation_name, state, facts))
        failure = last_failure(self._store)
        if failure is not None and not failure.is_refused:
            night_rows = _with_failure(night_rows, failure)
        return generation_rows, night_rows

    def _read_facts(self, generation_name: str, generation_state: str | None) -> GenerationFacts | None:
        earlier_facts = self._facts_by_generation.get(generation_name)
        if (
            earlier_facts is not None
            and earlier_facts.generation_state == generation_state
            and generation_state not in _BUSY_STATES
            and generation_state != "live"
        ):
            return earlier_facts
        try:
            manifest = read_manifest(self._store, generation_name)
        except (LarderError, OSError):
            return earlier_facts
        # Facts still change: verification rewrites gates, and the live generation's warm-up is recorded later.
        facts = self._facts_by_generation[generation_name] = _build_facts(
            generation_state, manifest, list(self._read_step_times(generation_name))
        )
        return facts

    def _read_step_times(self, generation_name: str) -> Iterable[tuple[str, float, float]]:
        for step in STEPS_TIMED_APART:
            with suppress(LarderError, OSError, ValueError, TypeError, KeyError):
                report_bytes = self._store.read(generation_path(generation_name, f"times/{step}.json"))
                if report_bytes is not None:
                    step_times = orjson.loads(report_bytes)
                    yield step, float(step_times["began_at"]), float(step_times["seconds"])


def _build_facts(
    generation_state: str | None, manifest: Manifest, step_times: Sequence[tuple[str, float, float]]
) -> GenerationFacts:
    seconds_by_step = dict(manifest.timings) | {step: step_seconds for step, _, step_seconds in step_times}
    reuse = Reuse.of(manifest.facts)
    seconds_before_seal = sum(step_seconds for step, step_seconds in manifest.timings.items() if step != "verify")
    return GenerationFacts(
        generation_state,
        {
            "data_until": manifest.data_until,
            "bytes": sum(
                artefact.size_bytes for artefact in (*manifest.served_artefacts(), *manifest.page_artefacts())
            ),
            "records": sum(table_part.count for table in manifest.stored_tables.values() for table_part in table.parts),
            "gates": [_gate_row(gate) for gate in manifest.gates],
            "remarks": [str(remark) for remark in manifest.facts.get("remarks", [])],
            "events_until": None if manifest.events is None else manifest.events.until,
        },
        manifest.created_at - seconds_before_seal,
        [{"step": step, "seconds": round(seconds_by_step[step], 3)} for step in NIGHT_STEPS if step in seconds_by_step],
        None if reuse is None else reuse.to_json(),
    )


def _gate_row(gate: Mapping[str, Any]) -> dict[str, Any]:
    verdict = "passed" if gate.get("passed") else "failed"
    return {
        "rule": str(gate.get("rule")), "value": gate.get("value"), "threshold": gate.get("threshold"),
        "verdict": "overridden" if gate.get("overridden") else verdict, "note": gate.get("note") or None,
    }  # fmt: skip


def _state_and_reason(
    generation_name: str, releases: Sequence[Release], registry_row: Mapping[str, Any] | None
) -> tuple[str | None, str | None]:
    """Return the state and its reason, from the registry or else from the release records."""
    own_releases = [release for release in releases if release.generation == generation_name]
    reason = next((release.reason for release in reversed(own_releases) if release.reason), None)
    if registry_row is not None:
        return str(registry_row.get("state")), str(registry_row["reason"]) if registry_row.get("reason") else reason
    return _proven_states(releases).get(generation_name), reason


def _proven_states(releases: Sequence[Release]) -> dict[str, str]:
    """Return the states of generations that follow from the release records (oldest first) alone."""
    state_by_generation: dict[str, str] = {}
    live_generation: str | None = None
    for release in releases:
        if release.action in POINTER_ACTIONS and not release.is_done:
            continue
        if release.action in MOVE_ACTIONS:
            if live_generation not in (None, release.generation):
                state_by_generation[str(live_generation)] = (
                    "rolled_back" if release.action == "roll_back" else "superseded"
                )
            live_generation = release.generation
            state_by_generation[live_generation] = "live"
        elif release.action == "end_canary":
            if release.abandoned:
                state_by_generation[release.generation] = "abandoned"
        elif release.action in _STATE_BY_ACTION and release.generation != live_generation:
            state_by_generation[release.generation] = _STATE_BY_ACTION[release.action]
    return state_by_generation


def _is_move(release: Release) -> bool:
    return release.action in MOVE_ACTIONS and release.is_done


def _generation_row(
    generation_name: str,
    generation_state: str | None,
    state_reason: str | None,
    releases: Sequence[Release],
    facts: GenerationFacts | None,
) -> dict[str, Any]:
    """Return a generation's row without its role, which the caller adds."""
    last_move = next(
        (release for release in reversed(releases) if release.generation == generation_name and _is_move(release)), None
    )
    return {
        "generation": generation_name,
        "state": generation_state,
        "epoch": None if last_move is None else last_move.epoch,
        "role": None,
        "published_at": None if last_move is None else publication_time(releases, generation_name) or last_move.at,
        **(_UNKNOWN_FIELDS if facts is None else facts.document_fields),
        "reason": state_reason,
    }


def _night_row(generation_name: str, generation_state: str | None, facts: GenerationFacts) -> dict[str, Any]:
    return {
        "generation": generation_name,
        "outcome": _OUTCOME_BY_STATE.get(generation_state or "", "unfinished"),
        "began_at": facts.night_began_at,
        "steps": list(facts.step_rows),
        "reuse": facts.reuse_fields,
        "failure": None,
    }


def _with_failure(night_rows: list[dict[str, Any]], failure: NightFailure) -> list[dict[str, Any]]:
    """Return the nights, the failed one first; if it failed early it has no files, and so no times of steps."""
    failed_night: dict[str, Any] = {
        "generation": failure.generation or "", "began_at": None, "steps": [], "reuse": None,
    }  # fmt: skip
    other_nights = []
    for night in night_rows:
        if night["generation"] == failure.generation:
            failed_night = night
        else:
            other_nights.append(night)
    failure_fields = {
        "outcome": f"failed in {failure.step}",
        "failure": {"step": failure.step, "at": failure.at, "error": failure.error},
    }
    return [failed_night | failure_fields, *other_nights][:SHOWN_NIGHTS_MAX]
