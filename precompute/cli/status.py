"""Command `status`: the state of one namespace in store, Redis and replicas, as a report and a table."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.table import Table
from rich.text import Text

from cache.config.timetable import Schedule
from cache.control.control_keys import RegistryRow, Replica
from cache.control.states import GenerationState, Ledger, fold_releases
from cache.control.store_problems import (
    UNREAD_BLOCKLIST_PROBLEM,
    full_store_problem,
    generation_files_problems,
    missing_records_advice,
    older_store_message,
    pointer_problem,
    replicas_ahead,
    unreadable_night_problem,
    unwritable_store_problem,
)
from cache.errors import LarderError, TierUnavailable
from cache.format.manifest import CUT_CHARS, Manifest
from cache.process.redis_server import running_server
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.blocklist import latest_blocklist
from cache.store.erasures import all_erasures, lost_records_problems
from cache.store.night_failure import NightFailure, last_failure
from cache.store.releases import Canary, Pointer, Release, all_releases, publication_time
from precompute.builds.night_failure import find_killed_step
from precompute.bundles.imports import find_import
from precompute.cli.temporary_redis import describe_ended_redis
from precompute.config.console import iso
from precompute.config.progress import size_text
from precompute.config.settings import NightConfig
from precompute.events.status import event_lines, event_problems, events_status, events_until
from precompute.planning.next_night import redis_and_disk_problems
from precompute.releases.release_log import Releases, generation_state, open_releases
from precompute.reuse.status import copied_share_text, copy_lines, reuse_field

REDIS_UNREACHABLE, REDIS_NOT_CONFIGURED, REDIS_REACHABLE = "away", "absent", "there"

NO_SETTINGS_TEXT = (
    "there is no larder.toml in this folder and no setting in the environment, so no project is known: go to the "
    "project's folder, or name its file with --config or LARDER_CONFIG (`larder init` writes one)"
)

LOCATION_VARIABLES = ("LARDER_CONFIG", "LARDER_ARTIFACTS", "LARDER_NAMESPACE", "REDIS_URL")
"""Environment variables that locate a namespace."""

PROBLEM_BY_STALE_REASON: Mapping[str, str] = {
    "blocklist_unreadable": UNREAD_BLOCKLIST_PROBLEM,
    "blocklist_not_enforced": "could not put the blocklist in force that it read: its log has the error; give it "
    "threads and memory",
    "experiments_unreadable": "cannot read the newest experiments: its log has the error; is the artefact store "
    "reachable and readable from its host?",
    "pointer_corrupt": "cannot read the pointer: run `larder restore`, which says what it found",
    "pointer_backwards": "follows a newer move than the pointer names: was Redis put back from a copy? `larder "
    "restore` sets the pointer",
    "pointer_conflicting": "follows another generation than the pointer names for the same move: do two Redis of one "
    "namespace run? `larder restore` sets the pointer",
    "eviction_policy": "found that Redis may evict published pages: set maxmemory-policy volatile-lru",
    "background_failing": "has a background loop that keeps failing: its log has the error, and "
    "`larder_background_failing` names the loop",
}
"""Problems of replicas, by the stale reason in their heartbeat; `STALE_REASONS_WITHOUT_LINE` has the others."""

STALE_REASONS_WITHOUT_LINE = frozenset({
    "starting",  # ends by itself
    "redis_unreachable", "pointer_vanished", "load_failed",  # a line says so already
    "events_behind",  # a few seconds are usual; the heartbeat's problem of events says when they are more
})  # fmt: skip
"""Stale reasons that `status` does not repeat for each replica."""

PROBLEM_BY_FEATURE: Mapping[str, str] = {
    "tokens": "does not apply its changed tokens file, so revoked tokens may still be valid",
    "tls": "sends an earlier certificate, because its changed TLS files cannot be used, or one that is not valid now",
    "events": "does not accept events, or lacks some that were accepted",
}
"""Problems that a replica finds itself, by the feature that its heartbeat names."""

FEATURE_FIELDS: Mapping[str, Callable[[Manifest], Any]] = {"reuse": reuse_field, "events_until": events_until}
"""Fields that features add to a generation's status, from its manifest; null without a manifest."""

FEATURE_LINES: tuple[Callable[[Mapping[str, Any]], list[str]], ...] = (copy_lines, event_lines)
"""Lines that features add below the table."""

_TABLE_COLUMNS = ("generation", "state", "data until", "Redis", "store", "copied", "gates", "notes")


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """State of a namespace; `read_at` is Redis' time if it answered. `redis_error`: why Redis did not answer.

    `is_own_redis`: Larder runs this Redis on this host.
    """

    ledger: Ledger
    read_at: float
    redis_state: str
    redis_error: str | None = None
    pointer: Pointer | None = None
    registry_rows: Mapping[str, RegistryRow] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()
    silent_replicas: int = 0
    redis_memory: Mapping[str, Any] = field(default_factory=dict)
    failure: NightFailure | None = None
    history: Sequence[Release] = ()
    killed_step: str | None = None
    """Step in which a night of this host was killed, with its generation."""
    is_own_redis: bool = False
    night_problems: Sequence[str] = ()
    """Why a night would be refused, by a replica of another release or for want of room, and pages that Redis lost."""

    @property
    def live_generation(self) -> str | None:
        """Live generation by the pointer, else by the release records."""
        return self.ledger.live_generation if self.pointer is None else self.pointer.generation

    @property
    def canary(self) -> Canary | None:
        """Canary by the pointer, else by the release records."""
        return self.ledger.canary if self.pointer is None else self.pointer.canary


def read_state(config: NightConfig) -> NamespaceState:
    """Read the state, without Redis only from the store; raise LarderError for a store that cannot be read."""
    failure, killed_step = last_failure(config.store()), find_killed_step(config)
    if not config.redis_url:
        history = all_releases(config.store())
        ended_redis_text = describe_ended_redis(config.path(config.state))
        return NamespaceState(
            fold_releases(history),
            time.time(),
            REDIS_NOT_CONFIGURED,
            ended_redis_text,
            failure=failure,
            history=history,
            killed_step=killed_step,
        )
    own_server = running_server(config.path(config.state))
    try:
        with open_releases(config) as releases:
            view = releases.view()
            return NamespaceState(
                view.ledger,
                releases.clock(),
                REDIS_REACHABLE,
                pointer=view.pointer,
                registry_rows=view.registry_rows,
                replicas=tuple(releases.control.replicas()),
                silent_replicas=releases.control.count_silent_replicas(),
                redis_memory=_redis_memory(releases.control.client),
                failure=failure,
                history=view.history,
                killed_step=killed_step,
                is_own_redis=own_server is not None and own_server.url == config.redis_url,
                night_problems=_list_night_problems(config, releases),
            )
    except TierUnavailable as error:
        history = all_releases(config.store())
        return NamespaceState(
            fold_releases(history), time.time(), REDIS_UNREACHABLE, error.message, failure=failure,
            history=history, killed_step=killed_step,
        )  # fmt: skip


def _redis_memory(client: Any) -> dict[str, Any]:
    """Return the memory of Redis in bytes, used and limit; empty if the user may not call INFO."""
    try:
        info = client.info("memory")
        return {"used_bytes": int(info["used_memory"]), "limit_bytes": int(info["maxmemory"])}
    except Exception:  # a cluster answers by node, a managed service may not answer
        return {}


def _list_night_problems(config: NightConfig, releases: Releases) -> list[str]:
    format_problem = unreadable_night_problem(releases.control)
    return [*([format_problem] if format_problem else []), *redis_and_disk_problems(config, releases)]


def report_status(config: NightConfig, namespace_state: NamespaceState, *, has_settings: bool = True) -> dict[str, Any]:
    """Report the state as JSON-able values; `problems` is empty if there is none.

    `has_settings`: a file or the environment locates this namespace; without settings, another one may be meant.
    """
    store = config.store()
    generation_ids = set(store.names("generations")) | set(namespace_state.registry_rows)
    generations = [
        _generation_fields(config, namespace_state, generation_id)
        for generation_id in sorted(generation_ids, reverse=True)
    ]
    schedule = _schedule_fields(config, namespace_state)
    namespace_status: dict[str, Any] = {
        "namespace": config.namespace,
        "well": True,
        "problems": [],
        "redis": {
            "state": namespace_state.redis_state,
            "why": namespace_state.redis_error,
            **namespace_state.redis_memory,
        },
        "live": namespace_state.live_generation,
        "published_at": _published_at_text(namespace_state),
        "model": _live_model(config, namespace_state.live_generation),
        "previous": namespace_state.ledger.previous_generation,
        "epoch": None if namespace_state.pointer is None else namespace_state.pointer.epoch,
        "canary": namespace_state.canary
        and {"generation": namespace_state.canary.generation, "percent": namespace_state.canary.percent},
        "generations": generations,
        "schedule": schedule,
        "replicas": [_replica_fields(replica) for replica in namespace_state.replicas],
        "silent_replicas": namespace_state.silent_replicas,
        **_blocklist_and_erasure_fields(store),
        "events": events_status(config, generations),
    }
    problems = _list_problems(config, namespace_status, namespace_state)
    if not has_settings and namespace_state.live_generation is None and not generations:
        problems = [NO_SETTINGS_TEXT]
    return namespace_status | {"well": not problems, "problems": problems}


def _blocklist_and_erasure_fields(store: ArtefactStore) -> dict[str, int | None]:
    """Return the version of the blocklist and the number of pending erasures; null for those that cannot be read."""
    records_status = dict[str, int | None].fromkeys(("blocklist_version", "erasures_pending"))
    with contextlib.suppress(LarderError):  # `lost_records_problems` says so
        records_status["blocklist_version"] = latest_blocklist(store).version
    with contextlib.suppress(LarderError):
        erasures = all_erasures(store, accepts_lost=True)
        records_status["erasures_pending"] = sum(erasure.is_pending for erasure in erasures)
    return records_status


def _published_at_text(namespace_state: NamespaceState) -> str | None:
    live_generation, pointer = namespace_state.live_generation, namespace_state.pointer
    if live_generation is None:
        return None
    published_at = publication_time(namespace_state.history, live_generation)
    return _iso_if_known(pointer.published_at if published_at is None and pointer is not None else published_at)


def _live_model(config: NightConfig, live_generation: str | None) -> dict[str, Any] | None:
    """Return name, digest and import of the live generation's bundle; None if its files are not in this store."""
    if live_generation is None:
        return None
    store = config.store()
    try:
        bundle_digest = read_manifest(store, live_generation).bundle_digest
        raw_description = store.read(generation_path(live_generation, "bundle/bundle.json"))
        bundle_name = None if raw_description is None else str(orjson.loads(raw_description).get("name"))
    except (LarderError, orjson.JSONDecodeError, AttributeError):  # damaged: `generation_files_problems` says so
        return None
    bundle_import = find_import(config.path(config.bundle).parent, bundle_digest)
    return {
        "name": bundle_name,
        "sha256": bundle_digest,
        "imported_at": bundle_import.get("imported_at"),
        "source": bundle_import.get("source") or None,
    }


def _list_problems(
    config: NightConfig, namespace_status: Mapping[str, Any], namespace_state: NamespaceState
) -> list[str]:
    problems, store = list[str](), config.store()
    pointer, schedule = namespace_state.pointer, namespace_status["schedule"]
    if namespace_state.redis_state == REDIS_UNREACHABLE:
        problems.append(f"Redis does not answer: {namespace_state.redis_error}")
    served_generations = {replica.served_generation for replica in namespace_state.replicas} - {None}
    if pointer is None and served_generations and not namespace_state.history:
        problems.append(
            f"replicas answer from {', '.join(sorted(map(str, served_generations)))}, but "
            f"{missing_records_advice(store)}"
        )
    elif namespace_state.live_generation is None:
        redis_clause = "" if namespace_state.redis_state != REDIS_REACHABLE else ", nor has Redis"
        problems.append(
            f"nothing is live: the artefact store {store.url} has no record of a publish{redis_clause}; run `larder "
            "night`, or set the right store (artifacts, LARDER_ARTIFACTS)"
        )
    if namespace_state.redis_state == REDIS_REACHABLE:
        live_key = config.keyspace().live
        pointer_finding = pointer_problem(pointer, namespace_state.history, store, live_key)
        if pointer_finding and pointer is None and namespace_state.is_own_redis:
            pointer_finding = (
                "Redis has lost its pointer: the `larder serve` that started it here fills it again within seconds; if "
                "not, run `larder restore`"
            )
        problems += [pointer_finding] if pointer_finding else []
    problems += generation_files_problems(store, namespace_state.history)
    problems += lost_records_problems(store)
    problems += event_problems(config, namespace_status["generations"])
    problems += namespace_state.night_problems
    if namespace_state.live_generation is not None and not namespace_state.replicas:
        problems += _no_replica_problems(namespace_state)
    if schedule["missing"] and namespace_state.live_generation is not None:
        problems.append(f"the generation of {schedule['due']} is missing: the live one is older")
    stays_clause = "" if namespace_state.live_generation is None else "; the live generation stays"
    if (failure := namespace_state.failure) is not None and not failure.is_refused:
        generation_clause = f" ({failure.generation})" if failure.generation else ""
        problems.append(
            f"the last night failed at {iso(failure.at)} in the step {failure.step}{generation_clause}: "
            f"{failure.error}{stays_clause}. Correct the cause, then run `larder night` again, or clear the failed task"
        )
    if namespace_state.killed_step is not None:
        problems.append(f"a night was stopped in {namespace_state.killed_step}: run it again{stays_clause}")
    live_cut = (namespace_state.live_generation or "")[:CUT_CHARS]
    for generation_status in namespace_status["generations"]:
        if (
            generation_status["state"] == GenerationState.REFUSED
            and generation_status["generation"][:CUT_CHARS] >= live_cut
        ):
            failed_gates = (generation_status["gates"] or {}).get("failed", ())
            rules = ", ".join(gate["rule"] for gate in failed_gates) or generation_status["reason"]
            refused_generation = generation_status["generation"]
            is_last_failure = failure is not None and failure.generation == refused_generation
            failed_at_clause = f" at {iso(failure.at)}" if failure is not None and is_last_failure else ""
            problems.append(
                f"{refused_generation} was refused{failed_at_clause}: {rules}; `larder verify {refused_generation}` "
                "shows the values, and what to do"
            )
    problems += [problem for problem in (full_store_problem(store), unwritable_store_problem(store)) if problem]
    blocklist_version = namespace_status["blocklist_version"]
    ahead = [] if blocklist_version is None else replicas_ahead(namespace_state.replicas, blocklist_version)
    if ahead:
        problems.append(older_store_message(ahead, blocklist_version, store.url))
    for replica in namespace_state.replicas:
        for reason in replica.stale_reasons:
            if reason in PROBLEM_BY_STALE_REASON and not (reason == "blocklist_unreadable" and replica in ahead):
                problems.append(f"replica {replica.name} {PROBLEM_BY_STALE_REASON[reason]} ({reason})")
        for feature, problem in replica.problem_by_feature.items():
            problem_text = PROBLEM_BY_FEATURE.get(feature, f"has a problem with {feature}")
            problems.append(f"replica {replica.name} {problem_text}: {problem}")
        for generation, load_error in replica.failure_by_generation.items():
            problems.append(f"replica {replica.name} cannot load {generation}: {load_error}")
        if replica.degraded is not None:
            problems.append(
                f"replica {replica.name} answers without its live model ({replica.degraded}), so ids that the night "
                "does not know get defaults: its log says why the model does not open; mend its host, or roll back"
            )
        if pointer is not None and replica.served_generation != pointer.generation:
            problems.append(f"replica {replica.name} answers from {replica.served_generation or 'nothing'}")
    return problems


def _no_replica_problems(namespace_state: NamespaceState) -> list[str]:
    """Return the problem that no replica serves the live generation; nothing while Redis is unreachable."""
    live_generation, silent_count = namespace_state.live_generation, namespace_state.silent_replicas
    if namespace_state.redis_state == REDIS_UNREACHABLE:
        return []
    if namespace_state.redis_state == REDIS_NOT_CONFIGURED:
        return [
            namespace_state.redis_error
            or f"no replica serves {live_generation}: no Redis is configured and none runs here; run "
            "`larder serve`, or set REDIS_URL to the Redis of the service"
        ]
    if silent_count:
        return [
            f"no replica answers, but {silent_count} did within the last day: start the service, or look at its log"
        ]
    return [f"no replica serves {live_generation}: run `larder serve`"]


def _generation_fields(config: NightConfig, namespace_state: NamespaceState, generation: str) -> dict[str, Any]:
    row, ledger = namespace_state.registry_rows.get(generation), namespace_state.ledger
    canary_generation = namespace_state.canary.generation if namespace_state.canary else None
    generation_by_role = {
        "live": namespace_state.live_generation,
        "previous": ledger.previous_generation,
        "canary": canary_generation,
    }
    generation_status: dict[str, Any] = {
        "generation": generation,
        "state": str(generation_state(generation, ledger, row) or GenerationState.BEGUN),
        "roles": [role for role, role_generation in generation_by_role.items() if role_generation == generation],
        "reason": "" if row is None else row.reason,
        "pinned": ledger.is_pinned(generation, namespace_state.read_at),
        "pinned_until": _iso_if_known(ledger.pin_expiry_by_generation.get(generation)),
    }
    try:
        manifest = read_manifest(config.store(), generation)
    except LarderError:
        return generation_status | _manifest_fields(None, {})
    return generation_status | _manifest_fields(manifest, ledger.overrides_by_generation.get(generation, {}))


def _manifest_fields(manifest: Manifest | None, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a finished generation; null for an unfinished one."""
    if manifest is None:
        return dict.fromkeys(
            ("data_until", "tables", "redis_bytes", "store_bytes", "gates", "remarks", *FEATURE_FIELDS)
        )
    sizes_by_table = {
        field_name: {
            "records": sum(part.count for part in table.parts),
            "bytes": sum(part.file.size_bytes for part in table.parts),
        }
        for field_name, table in manifest.stored_tables.items()
    }
    failed_gates = [
        {field_name: gate.get(field_name) for field_name in ("rule", "value", "threshold")}
        for gate in manifest.gates
        if not gate["passed"]
    ]
    return {
        "data_until": _iso_if_known(manifest.data_until),
        "tables": sizes_by_table,
        "redis_bytes": sum(table_sizes["bytes"] for table_sizes in sizes_by_table.values()),
        "store_bytes": sum(file.size_bytes for file in (*manifest.served_artefacts(), *manifest.page_artefacts())),
        "gates": {
            "run": len(manifest.gates),
            "failed": failed_gates,
            "not_judged": [gate["rule"] for gate in manifest.gates if gate["passed"] and gate.get("value", 0) is None],
            "overrides": dict(overrides),
        },
        "remarks": list(manifest.facts.get("remarks", [])),
        **{field_name: feature_field(manifest) for field_name, feature_field in FEATURE_FIELDS.items()},
    }


def _schedule_fields(config: NightConfig, namespace_state: NamespaceState) -> dict[str, Any]:
    schedule = Schedule(config.schedule, config.timezone, config.schedule_grace_s)
    next_at = schedule.tick_after(namespace_state.read_at)
    created_at: float | None = None
    data_until: float | None = None
    if namespace_state.live_generation is not None:
        try:
            manifest = read_manifest(config.store(), namespace_state.live_generation)
            created_at, data_until = float(manifest.created_at), float(manifest.data_until)
        except LarderError:
            created_at = None
    return {
        "cron": config.schedule,
        "timezone": config.timezone,
        "due": _iso_if_known(schedule.due_tick(namespace_state.read_at)),
        # Without the files of the live generation the time of its making is unknown.
        "missing": None
        if namespace_state.live_generation is not None and created_at is None
        else schedule.is_generation_missing(namespace_state.read_at, created_at),
        "age_seconds": None if data_until is None else round(namespace_state.read_at - data_until),
        "next": _iso_if_known(next_at),
        "next_expected_by": _iso_if_known(next_at + config.schedule_grace_s),
    }


def _replica_fields(replica: Replica) -> dict[str, Any]:
    return {
        "replica": replica.name,
        "serving": replica.served_generation,
        "epoch": replica.pointer_epoch,
        "ready": list(replica.ready_generations),
        "failed": dict(replica.failure_by_generation),
        "degraded": replica.degraded,
        "stale": ",".join(replica.stale_reasons) or None,
        "blocklist_version": replica.blocklist_version,
        "problems": dict(replica.problem_by_feature),
    }


def _iso_if_known(unix_s: float | None) -> str | None:
    return None if unix_s is None else iso(unix_s)


def render_status(namespace_status: Mapping[str, Any]) -> list[Table | str | Text]:
    """Render a verdict, the generations, then one line for each other subject."""
    table = Table(*_TABLE_COLUMNS, title=f"namespace {namespace_status['namespace']}")
    for generation_status in namespace_status["generations"]:
        table.add_row(*_generation_row(generation_status))
    status_lines = [f"not well: {problem}" for problem in namespace_status["problems"]] or ["all is well"]
    status_lines += list(_detail_lines(namespace_status))
    return [table, *map(Text, status_lines)]


def _generation_row(generation_status: Mapping[str, Any]) -> tuple[str, ...]:
    note_words = list(generation_status["roles"])
    if generation_status["pinned"]:
        pinned_until = generation_status["pinned_until"]
        note_words.append("pinned" + (f" until {pinned_until}" if pinned_until else ""))
    return (
        generation_status["generation"],
        generation_status["state"],
        generation_status["data_until"] or "-",
        _size_cell(generation_status["redis_bytes"]),
        _size_cell(generation_status["store_bytes"]),
        copied_share_text(generation_status["reuse"]),
        _gates_text(generation_status["gates"]),
        " ".join(note_words),
    )


def _size_cell(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size_text(size_bytes)


def _gates_text(gates: Mapping[str, Any] | None) -> str:
    if gates is None:
        return "-"
    if not gates["run"]:
        return "not run"
    failed_rules, overrides = [gate["rule"] for gate in gates["failed"]], gates["overrides"]
    overrides_text = f"; waived: {', '.join(overrides)}" if overrides else ""
    if failed_rules:
        return f"failed: {', '.join(failed_rules)}{overrides_text}"
    not_judged_count = len(gates["not_judged"])
    not_judged_text = f", {not_judged_count} not judged" if not_judged_count else ""
    return f"{gates['run'] - not_judged_count} passed{not_judged_text}{overrides_text}"


def _live_lines(namespace_status: Mapping[str, Any]) -> list[str]:
    """Describe the live generation: since when it is live, its model, and remarks on its night."""
    if namespace_status["live"] is None:
        return []
    live_line = f"live: {namespace_status['live']}"
    if namespace_status["published_at"] is not None:
        live_line += f" since {namespace_status['published_at']}"
    if (model := namespace_status["model"]) is not None:
        live_line += f", model {model['name']} (sha256 {model['sha256'][:12]}"
        if model["imported_at"]:
            live_line += f", imported {model['imported_at']}"
            live_line += f" from {model['source']}" if model["source"] else ""
        live_line += ")"
    remark_lines = [
        f"note on {generation_status['generation']}: {remark}"
        for generation_status in namespace_status["generations"]
        for remark in generation_status["remarks"] or ()
        if generation_status["state"] in (GenerationState.LIVE, GenerationState.VERIFIED)
    ]
    return [live_line, *remark_lines]


def _detail_lines(namespace_status: Mapping[str, Any]) -> list[str]:
    schedule, redis = namespace_status["schedule"], namespace_status["redis"]
    due_state_text = {True: "missing", False: "there", None: "not known"}[schedule["missing"]]
    due_text = f"due: the generation of {schedule['due']} is {due_state_text}"
    next_text = f"next at {schedule['next']}, expected by {schedule['next_expected_by']}"
    detail_lines = _live_lines(namespace_status)
    detail_lines.append(f"{due_text}; {next_text} ({schedule['cron']}, {schedule['timezone']})")
    if redis["state"] == REDIS_UNREACHABLE:
        detail_lines.append(
            "this is what the artefact store knows; only Redis knows which generations were loaded or verified"
        )
    elif redis["state"] == REDIS_NOT_CONFIGURED:
        detail_lines.append("no Redis is configured and none runs here: this is what the artefact store knows")
    else:
        epoch = namespace_status["epoch"]
        detail_lines.append(
            "Redis has no pointer: nothing was published, or it is lost (restore)"
            if epoch is None
            else f"epoch {epoch}"
        )
        if limit_bytes := redis.get("limit_bytes"):
            detail_lines.append(f"Redis holds {size_text(redis['used_bytes'])} of {size_text(limit_bytes)}")
    if (canary := namespace_status["canary"]) is not None:
        detail_lines.append(f"canary {canary['generation']} on {canary['percent']:g} %")
    for feature_lines in FEATURE_LINES:
        detail_lines += feature_lines(namespace_status)
    replica_count = len(namespace_status["replicas"])
    replicas_text = (
        f"{replica_count} replica{'s' * (replica_count != 1)}"
        if redis["state"] == REDIS_REACHABLE
        else "replicas not counted, since their heartbeats are in Redis"
    )
    blocklist_version, pending_count = (namespace_status[name] for name in ("blocklist_version", "erasures_pending"))
    blocklist_text = "not readable" if blocklist_version is None else f"version {blocklist_version}"
    detail_lines.append(f"{replicas_text}, blocklist {blocklist_text}")
    detail_lines.append(
        "erasures not readable" if pending_count is None else f"{pending_count} erasures pending (erase --list)"
    )
    return detail_lines
