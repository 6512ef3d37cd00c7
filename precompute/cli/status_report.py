"""Status of one namespace, for `status`: what the store knows, and what Redis and the replicas add."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cache.control.schedule import Schedule
from cache.errors import LarderError, TierUnavailable
from cache.format.manifest import CUT_CHARS, Manifest
from cache.format.reuse import Reuse
from cache.store.artefacts import read_manifest
from cache.store.blocklist import latest_blocklist
from cache.store.releases import Canary, Pointer, all_releases
from precompute.config.settings import NightConfig
from precompute.control.rows import Replica, Row
from precompute.control.states import Ledger, State, fold
from precompute.erasures.erasure import all_erasures
from precompute.events.files import last_taken
from precompute.releases.registry import open_releases
from precompute.releases.release_log import standing

AWAY, ABSENT, THERE = "away", "absent", "there"
NO_SETTINGS = (
    "there is no larder.toml in this folder and no setting in the environment, so there is nothing to look at: go to "
    "the project's folder, or name its file with --config or LARDER_CONFIG (`larder init` writes one)"
)
PLACES = ("LARDER_CONFIG", "LARDER_ARTIFACTS", "LARDER_NAMESPACE", "REDIS_URL")
"""Variables of the environment of which each says where a namespace is."""


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """State as read; `now` is Redis' time where it could be asked. `why`: what keeps Redis from being asked."""

    ledger: Ledger
    now: float
    redis: str
    why: str | None = None
    pointer: Pointer | None = None
    rows: Mapping[str, Row] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()
    silent_replicas: int = 0
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> str | None:
        """Live generation by the pointer, else by the releases."""
        return self.ledger.live if self.pointer is None else self.pointer.generation

    @property
    def canary(self) -> Canary | None:
        """Canary by the pointer, else by the releases."""
        return self.ledger.canary if self.pointer is None else self.pointer.canary


def look(config: NightConfig) -> NamespaceState:
    """Reads what there is, without Redis the store alone; raises LarderError for a store that cannot be read."""
    if not config.redis_url:
        return NamespaceState(fold(all_releases(config.store())), time.time(), ABSENT)
    try:
        with open_releases(config) as releases:
            view = releases.view()
            return NamespaceState(
                view.ledger,
                releases.clock(),
                THERE,
                pointer=view.pointer,
                rows=view.rows,
                replicas=tuple(releases.control.replicas()),
                silent_replicas=releases.control.silent_replicas(),
                memory=_memory(releases.control.client),
            )
    except TierUnavailable as error:
        ledger = fold(all_releases(config.store()))
        return NamespaceState(ledger, time.time(), AWAY, error.message)


def _memory(client: Any) -> dict[str, Any]:
    """Memory of Redis in bytes, used and limit; empty where the user may not ask."""
    try:
        info = client.info("memory")
        return {"used_bytes": int(info["used_memory"]), "limit_bytes": int(info["maxmemory"])}
    except Exception:  # a cluster answers by node, a managed service perhaps not at all
        return {}


def report(
    config: NightConfig, seen: NamespaceState, *, has_settings: bool = True
) -> dict[str, Any]:
    """Report of all of it as JSON-able values; `problems` is empty if all is well.

    `has_settings`: a file or the environment says where this namespace is; without, it may well not be here.
    """
    store = config.store()
    known = set(store.names("generations")) | set(seen.rows)
    generations = [_generation(config, seen, each) for each in sorted(known, reverse=True)]
    schedule = _schedule(config, seen)
    told: dict[str, Any] = {
        "namespace": config.namespace,
        "well": True,
        "problems": [],
        "redis": {"state": seen.redis, "why": seen.why, **seen.memory},
        "live": seen.live,
        "previous": seen.ledger.previous,
        "epoch": None if seen.pointer is None else seen.pointer.epoch,
        "canary": seen.canary
        and {"generation": seen.canary.generation, "percent": seen.canary.percent},
        "generations": generations,
        "schedule": schedule,
        "replicas": [_replica(each) for each in seen.replicas],
        "silent_replicas": seen.silent_replicas,
        "blocklist_version": latest_blocklist(store).version,
        "erasures_pending": sum(each.is_pending for each in all_erasures(store)),
        "events": _events(config, generations),
    }
    problems = list(_problems(told, seen))
    if not has_settings and seen.live is None and not generations:
        problems = [NO_SETTINGS]
    return told | {"well": not problems, "problems": problems}


def _problems(told: Mapping[str, Any], seen: NamespaceState) -> list[str]:
    found = []
    ledger, pointer, schedule = seen.ledger, seen.pointer, told["schedule"]
    if seen.redis == AWAY:
        found.append(f"Redis cannot be asked: {seen.why}")
    if seen.live is None:
        found.append("nothing is live: run `larder night`")
    if seen.redis == THERE and ledger.live is not None:
        if pointer is None:
            found.append("Redis has lost its pointer: run `larder restore`")
        elif pointer.epoch != ledger.live_epoch:
            found.append(
                f"Redis follows epoch {pointer.epoch}, the release records say {ledger.live_epoch}: run "
                "`larder restore`"
            )
    if seen.silent_replicas and not seen.replicas and seen.live is not None:
        found.append(
            f"no replica answers, and {seen.silent_replicas} beat within the last day: start the service, or look at "
            "its log"
        )
    if schedule["missing"] and seen.live is not None:
        found.append(f"the generation of {schedule['due']} is missing: what is live is older")
    live_cut = (seen.live or "")[:CUT_CHARS]
    for each in told["generations"]:
        if each["state"] == State.REFUSED and each["generation"][:CUT_CHARS] >= live_cut:
            failed = (each["gates"] or {}).get("failed", ())
            rules = ", ".join(gate["rule"] for gate in failed) or each["reason"]
            found.append(f"{each['generation']} was refused: {rules}")
    for replica in seen.replicas:
        for generation, why in replica.failed.items():
            found.append(f"replica {replica.name} cannot load {generation}: {why}")
        if pointer is not None and replica.serving != pointer.generation:
            found.append(f"replica {replica.name} answers from {replica.serving or 'nothing'}")
    return found


def _generation(config: NightConfig, seen: NamespaceState, generation: str) -> dict[str, Any]:
    row, ledger = seen.rows.get(generation), seen.ledger
    canary = seen.canary.generation if seen.canary else None
    roles = {"live": seen.live, "previous": ledger.previous, "canary": canary}
    told: dict[str, Any] = {
        "generation": generation,
        "state": str(standing(generation, ledger, row) or State.BEGUN),
        "roles": [role for role, each in roles.items() if each == generation],
        "reason": "" if row is None else row.reason,
        "pinned": ledger.is_pinned(generation, seen.now),
        "pinned_until": _iso(ledger.pinned.get(generation)),
    }
    try:
        manifest = read_manifest(config.store(), generation)
    except LarderError:
        return told | _of_manifest(None, {})
    return told | _of_manifest(manifest, ledger.overrides.get(generation, {}))


def _of_manifest(manifest: Manifest | None, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Fields that only a finished generation has; null before that."""
    if manifest is None:
        return dict.fromkeys(
            ("data_until", "tables", "redis_bytes", "store_bytes", "gates", "reuse", "events_until")
        )
    tables = {
        name: {
            "records": sum(part.count for part in table.parts),
            "bytes": sum(part.file.size_bytes for part in table.parts),
        }
        for name, table in manifest.stored.items()
    }
    failed = [
        {name: gate.get(name) for name in ("rule", "value", "threshold")}
        for gate in manifest.gates
        if not gate["passed"]
    ]
    return {
        "data_until": _iso(manifest.data_until),
        "tables": tables,
        "redis_bytes": sum(each["bytes"] for each in tables.values()),
        "store_bytes": sum(each.size_bytes for each in (*manifest.artefacts(), *manifest.pages())),
        "gates": {"run": len(manifest.gates), "failed": failed, "overrides": dict(overrides)},
        "reuse": None if (reuse := Reuse.of(manifest.facts)) is None else reuse.to_json(),
        "events_until": None if manifest.events is None else manifest.events.until,
    }


def _events(
    config: NightConfig, generations: Sequence[Mapping[str, Any]]
) -> dict[str, str | None] | None:
    """Positions up to which nights took events over, and the live generation has them; None where none are taken in."""
    if not config.events.enabled:
        return None
    live = (each["events_until"] for each in generations if "live" in each["roles"])
    return {
        "taken_until": str(last_taken(config.of_events().store())),
        "live_until": next(live, None),
    }


def _schedule(config: NightConfig, seen: NamespaceState) -> dict[str, Any]:
    schedule = Schedule(config.schedule, config.timezone, config.schedule_grace_s)
    next_at = schedule.tick_after(seen.now)
    created_at: float | None = None
    data_until: float | None = None
    if seen.live is not None:
        try:
            manifest = read_manifest(config.store(), seen.live)
            created_at, data_until = float(manifest.created_at), float(manifest.data_until)
        except LarderError:
            created_at = None
    return {
        "cron": config.schedule,
        "timezone": config.timezone,
        "due": _iso(schedule.due(seen.now)),
        "missing": schedule.is_missing(seen.now, created_at),
        "age_seconds": None if data_until is None else round(seen.now - data_until),
        "next": _iso(next_at),
        "next_expected_by": _iso(next_at + config.schedule_grace_s),
    }


def _replica(replica: Replica) -> dict[str, Any]:
    return {
        "replica": replica.name,
        "serving": replica.serving,
        "epoch": replica.epoch,
        "ready": list(replica.ready),
        "failed": dict(replica.failed),
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else iso(at)


def iso(at: float) -> str:
    """Unix seconds as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
