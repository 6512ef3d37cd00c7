"""`larder check`: looks at what a night and the service need, and says of each whether it is ok, or what to do."""

import argparse
import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from cache.errors import LarderError
from cache.process.command_line import NOT_WELL, json_text
from cache.process.extras import PRECOMPUTE, missing
from infra.cli.dags import dags_folder, files_in
from infra.cli.redis import place_of
from infra.cli.redis_kind import kind_of
from infra.cli.settings import night_settings

if TYPE_CHECKING:
    from cache.config.night import NightConfig
    from serving.events.durability import FoundDurability

REDIS_S = 3.0

State = Literal["ok", "to do", "not used"]


class CheckLine(NamedTuple):
    """State of one thing that was looked at, and in words what was found or is to be done."""

    what: str
    state: State
    told: str


def main(words: Sequence[str], *, prog: str) -> int:
    """Exit code: 0 nothing is to be done, 3 something is."""
    sent = argument_parser(prog).parse_args(words)
    findings = [_looked("settings", _settings)]
    if findings[0].state == "ok":
        config = night_settings()
        findings += [_looked(name, partial(look, config)) for name, look in LOOKS.items()]
    if sent.json:
        print(json_text([each._asdict() for each in findings]))
    else:
        for each in findings:
            print(f"{each.state:<9} {each.what:<9} {each.told}")
    return NOT_WELL if any(each.state == "to do" for each in findings) else 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at settings, sources, bundle, Redis, that of events, the provider of live models, the "
        "artefact store, Airflow and lineage, and say of each whether it is ok, or what to do. Nothing is changed but "
        "that the store's folder is made. Exit code: 0 nothing is to be done, 3 something is.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _looked(what: str, look: Callable[[], tuple[State, str]]) -> CheckLine:
    try:
        return CheckLine(what, *look())
    except LarderError as error:
        return CheckLine(what, "to do", error.message)
    except OSError as error:
        return CheckLine(what, "to do", f"this machine refused: {error}")


def _settings() -> tuple[State, str]:
    """The file and the environment, for night and service alike."""
    from cache.config.serving import ServingConfig

    night_settings()
    ServingConfig.load(os.environ)
    file = os.environ.get("LARDER_CONFIG")
    if not file:
        return "to do", "no larder.toml here, and no LARDER_CONFIG: `larder init` writes one"
    return "ok", file


def _sources(config: "NightConfig") -> tuple[State, str]:
    if line := missing("a look at sources", "precompute", *PRECOMPUTE):
        return "not used", f"by the service; {line}"
    from precompute.sources.files import all_files, source_file
    from precompute.sources.formats import INTERACTIONS
    from precompute.sources.readers import feature_schema, read_interactions
    from precompute.sources.unusable import Unusable

    sources, base = config.sources, config.path(".")
    if not sources.names_users:
        return "to do", "[sources] interactions is not set: `larder init` looks for them"
    files = all_files(config)
    unusable = Unusable()
    read = read_interactions(sources, base, unusable=unusable)
    first = next(read, None)
    rows = 0 if first is None else len(first.times)
    left_out = unusable.left_out(INTERACTIONS)
    is_all = next(read, None) is None
    if sources.interactions and not rows:
        return "to do", f"no interaction in the first rows of {files[0]}: is every weight above 0?"
    for name, columns in (
        (sources.item_features, (sources.item_column,)),
        (sources.user_features, (sources.user_column,)),
        (sources.user_vectors, (sources.user_column, sources.vector_column)),
        (sources.item_vectors, (sources.item_column, sources.vector_column)),
    ):
        if name:
            feature_schema(source_file(name, base), columns)
    found = f"{len(files)} file{'s' * (len(files) > 1)}"
    if not sources.interactions:
        return "ok", f"{found}, none of interactions: users are those of {sources.user_vectors}"
    told = f"{found}; {rows:,} interactions" + ("" if is_all else " in the first rows")
    return "ok", told + (f", {left_out:,} rows that cannot be used" if left_out else "")


def _bundle(config: "NightConfig") -> tuple[State, str]:
    if line := missing("a look at bundles", "precompute", *PRECOMPUTE):
        return "not used", f"by the service; {line}"
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import handed_over
    from precompute.scoring.inputs import demand_feature_types

    if config.sources.item_vectors:
        return "ok", f"made of {config.sources.item_vectors} by each night"
    folder = config.path(config.bundle)
    if folder.exists():
        bundle = Bundle.read(folder)
        bundle.verify()
        demand_feature_types(config, bundle)
        return "ok", f"{folder}: {bundle.name} {bundle.version}"
    if known := handed_over(config.store()):
        return "ok", f"{known[-1].digest[:12]}, handed over to the store"
    return "to do", f"none at {folder}: set `bundle`, or run `larder train`"


def _redis(config: "NightConfig") -> tuple[State, str]:
    from redis import RedisError

    from cache.l2.sync_clients import masters, open_client
    from cache.process.redis_server import find_server, running_server

    found = running_server(config.path(config.state))
    url = config.redis_url or (found.url if found else None)
    if url is None:
        return (
            "ok",
            f"none is configured: each command runs {find_server()} for as long as it lasts (`larder redis`)",
        )
    try:
        client = open_client(url, protocol=2, socket_timeout=REDIS_S)
        try:
            servers = masters(client).values()
            policies = {str(each.info("memory").get("maxmemory_policy", "")) for each in servers}
            kinds = sorted({kind_of(each) for each in servers})
        finally:
            client.close()
    except (RedisError, ValueError, OSError) as error:
        return (
            "to do",
            f"{place_of(url)} cannot be used: {error}; is REDIS_URL right, and does it run?",
        )
    if unfit := sorted(each for each in policies if each.startswith("allkeys")):
        return "to do", f"maxmemory-policy {unfit[0]} may evict published pages: set volatile-lru"
    for kind in kinds:
        if kind.missing:
            return "to do", f"{place_of(url)} is {kind}, which has no {', no '.join(kind.missing)}"
    told = (
        f"{place_of(url)}{'' if config.redis_url else ', of `larder redis` or another command'}; "
    )
    told += ", ".join(map(str, kinds))
    without = sorted({each for kind in kinds for each in kind.without})
    return "ok", told + "".join(f"; without {each}" for each in without)


def _events(config: "NightConfig") -> tuple[State, str]:
    if not config.events.enabled:
        return "not used", "[events] enabled is false: no service takes events in"
    from cache.process.redis_server import running_server

    found = running_server(config.path(config.state))
    url = config.events_redis or (found.url if found else "")
    if not url:
        return "ok", "in the Redis that each command runs for as long as it lasts: gone with it"
    try:
        kept, policy = asyncio.run(_looked_at(url, config))
    except LarderError as error:
        return (
            "to do",
            f"{place_of(url)} cannot be used: {error.message}; is LARDER_EVENTS_URL right, and does it run?",
        )
    if policy.startswith("allkeys"):
        return (
            "to do",
            f"maxmemory-policy {policy} may evict events: set "
            + ("noeviction" if config.events_url else "volatile-lru"),
        )
    may_evict_ids = policy.startswith("volatile")
    if may_evict_ids and config.events_url:
        return (
            "to do",
            f"maxmemory-policy {policy} may evict the ids that make a repetition none: set noeviction",
        )
    demanded = config.events.durability
    if not kept.suffices(demanded):
        told = f"durability = {demanded!r} is demanded, and {place_of(url)} has {kept.kept!r}"
        return "to do", f"{told}: set appendonly yes and appendfsync {demanded} there"
    told = f"{place_of(url)}; durability {kept.kept}, maxmemory-policy {policy or 'not told'}"
    return "ok", told + (
        ", which may evict ids of events: a repetition may count" if may_evict_ids else ""
    )


async def _looked_at(url: str, config: "NightConfig") -> "tuple[FoundDurability, str]":
    from serving.events.connection import EventsRedis

    redis = EventsRedis(url, config.events.durability)
    try:
        kept = await redis.look_at_durability()
        policy = await redis.eviction_policy()
    finally:
        await redis.aclose()
    return kept, policy


def _live(_config: "NightConfig") -> tuple[State, str]:
    from cache.config.serving import ServingConfig

    provider = ServingConfig.load(os.environ).live_provider
    if provider == "cpu":
        return "not used", "live_provider is cpu: live models run on the processor"
    from cache.model.runtime import Accelerator

    if (why := Accelerator(provider).missing()) is not None:
        return (
            "to do",
            f"live models would run on the processor: {why}, or set live_provider to cpu",
        )
    return (
        "ok",
        f"{provider}; whether models could be loaded there, `fallback` of /v1/generations says",
    )


def _store(config: "NightConfig") -> tuple[State, str]:
    store = config.store()
    store.demand_write_once()
    count = len(store.names("generations"))
    return (
        "ok",
        f"{config.artifacts}: {count} generation{'s' * (count != 1)} in namespace {config.namespace}",
    )


def _airflow(_config: "NightConfig") -> tuple[State, str]:
    if missing("a night", "airflow", "airflow"):
        return (
            "not used",
            "Airflow is not installed here: `larder night` runs a night, from cron for instance",
        )
    try:
        folder = dags_folder(None)
    except LarderError:
        return (
            "not used",
            "no AIRFLOW_HOME: `larder dags install FOLDER` adds the nights to an Airflow",
        )
    states = {file.target: file.state() for file in files_in(folder)}
    for target, state in states.items():
        if state in ("older", "changed", "foreign", "missing"):
            return "to do", f"{target}: {_AIRFLOW[state]}; `larder dags install`"
    return "ok", f"{len(states)} DAGs in {Path(folder)}"


def _lineage(_config: "NightConfig") -> tuple[State, str]:
    if not any(os.environ.get(name) for name in _TRANSPORTS):
        return "not used", f"no transport for OpenLineage's events, such as {_TRANSPORTS[0]}"
    if line := missing("lineage", "lineage", "openlineage"):
        return "to do", line
    if _EXTRACTOR not in os.environ.get(_EXTRACTORS, "").split(";"):
        return "to do", f"events say nothing of data: set {_EXTRACTORS}={_EXTRACTOR}"
    return (
        "ok",
        "each task of a night sends OpenLineage's events, where Airflow has this environment",
    )


_TRANSPORTS = (
    "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__CONFIG_PATH", "OPENLINEAGE_URL", "OPENLINEAGE_CONFIG",
)  # fmt: skip
_EXTRACTORS = "AIRFLOW__OPENLINEAGE__EXTRACTORS"
_EXTRACTOR = "infra.lineage.extractor.NightExtractor"
_AIRFLOW = {
    "missing": "not there",
    "older": "of another release",
    "changed": "changed by hand",
    "foreign": "not ours",
}
LOOKS: dict[str, Callable[["NightConfig"], tuple[State, str]]] = {
    "sources": _sources,
    "bundle": _bundle,
    "redis": _redis,
    "events": _events,
    "live": _live,
    "store": _store,
    "airflow": _airflow,
    "lineage": _lineage,
}
