"""`larder check`: the requirements of a night and the service, each `ok`, `to do` with a remedy, or `not used`.

Each check imports precompute, serving and cache where it runs: extras may be missing.
"""

import argparse
import asyncio
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from cache.errors import BundleError, LarderError, StoreError
from cache.format.redis_keys import KEYSPACE_VERSION, Keyspace
from cache.process.command_line import (
    NOT_WELL,
    PRECOMPUTE_MODULES,
    install_command,
    json_text,
    missing_extra,
    printable_lines,
)
from infra.cli.commands import night_settings
from infra.cli.dags import airflow_refusal, airflow_version, dags_folder, files_in
from infra.cli.redis import place_of

if TYPE_CHECKING:
    import redis

    from cache.config.night import NightConfig
    from precompute.sources.readers import Interactions
    from precompute.sources.unusable import UnusableRows
    from serving.events.connection import FoundDurability

CheckState = Literal["ok", "to do", "not used"]

CheckResult = tuple[CheckState, str]
"""State of a check, and its finding or remedy in words."""

FILES_COMPARED = 1_000
"""Number of files whose columns a check compares; a night compares all."""

REDIS_TIMEOUT_S = 3.0

NEEDED_COMMANDS: Final = tuple(
    """del eval evalsha exists expire get getrange hdel hget hgetall hlen hset incr info memory mget pexpire pfadd
    pfcount ping pttl publish script set setrange strlen subscribe time unlink unsubscribe wait xack xadd xautoclaim
    xdel xgroup xinfo xlen xrange xread xreadgroup xrevrange xtrim zadd zincrby zrangebyscore zrem zremrangebyrank
    zremrangebyscore zrevrange""".split()  # noqa: SIM905  # fifty words, one a line
)
"""Redis commands that nights, the service or events need."""

DISPENSABLE_COMMANDS: Final = {
    "config": "settings are read from INFO, and how durable events are is tried out",
    "waitaof": "without CONFIG, too, no event is known to be durable",
}
"""Redis commands that Larder can do without -> the consequence."""

FLAGGED_SCRIPT: Final = "#!lua flags=allow-oom\nreturn 1"
"""Script with flags, like those that move the pointer and send heartbeats, which run also at maxmemory."""

_SCRIPT_REFUSED: Final = re.compile("compil|flag|shebang|unknown command", re.IGNORECASE)
"""Pattern in the error of a server that does not support such a script."""

LINEAGE_TRANSPORTS = (
    "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__CONFIG_PATH", "OPENLINEAGE_URL", "OPENLINEAGE_CONFIG",
)  # fmt: skip
"""Settings that name a transport for lineage events."""

_LINEAGE_PROVIDER = "apache-airflow-providers-openlineage"
_LINEAGE_EXTRACTORS = "AIRFLOW__OPENLINEAGE__EXTRACTORS"
_LINEAGE_EXTRACTOR = "infra.lineage.extractor.NightExtractor"

_DAG_FILE_STATES = {
    "missing": "not there",
    "older": "of another release",
    "changed": "changed by hand",
    "foreign": "not ours",
}


class CheckLine(NamedTuple):
    """State of one checked subject, and its finding or remedy in words."""

    what: str
    state: CheckState
    told: str


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run all checks; return exit code 0 if there is nothing to do, 3 otherwise."""
    args = argument_parser(prog).parse_args(argv)
    findings = [_run_check("settings", _settings)]
    if findings[0].state == "ok":
        config = night_settings()
        findings += [_run_check(name, partial(check, config)) for name, check in CHECKS.items()]
    if args.json:
        print(printable_lines(json_text([finding._asdict() for finding in findings])))
    else:
        for finding in findings:
            print(printable_lines(f"{finding.state:<9} {finding.what:<9} {finding.told}"))
    return NOT_WELL if any(finding.state == "to do" for finding in findings) else 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at settings, sources, bundle, Redis, that of events, the provider of live models, the "
        "artefact store, Airflow and lineage, and say of each whether it is ok, or what to do. Nothing is changed but "
        "that the store's folder is made, unless Redis is another store's. Exit code: 0 nothing is to be done, 3 "
        "something is.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _run_check(subject: str, check: Callable[[], CheckResult]) -> CheckLine:
    try:
        return CheckLine(subject, *check())
    except LarderError as error:
        return CheckLine(subject, "to do", error.message)
    except OSError as error:
        return CheckLine(subject, "to do", f"this machine refused: {error}")


def _settings() -> CheckResult:
    """Check the file and the environment, for night and service alike."""
    from cache.config.serving import ServingConfig

    night_settings()
    ServingConfig.load(os.environ)
    file = os.environ.get("LARDER_CONFIG")
    if not file:
        return "to do", "no larder.toml here, and no LARDER_CONFIG: `larder init` writes one"
    return "ok", file


def look_at_sources(config: "NightConfig") -> CheckResult:
    """Check the files of the sources, and their first rows."""
    if line := missing_extra("a look at sources", "precompute", *PRECOMPUTE_MODULES):
        return "not used", f"by the service; {line}"
    from precompute.bundles.bundle_store import look_at_chosen
    from precompute.features import setting_checks
    from precompute.partitions.table_look import first_rows, look_at_tables
    from precompute.sources.files import all_files, find_copy_remarks, source_file, source_files
    from precompute.sources.plausibility import (
        Shape,
        chosen_cut_in_words,
        demand_least,
        demand_times,
        remarks,
        swapped_in_words,
    )
    from precompute.sources.readers import (
        INTERACTIONS,
        demand_same_columns,
        feature_schema,
        read_interactions,
        row_count,
    )
    from precompute.sources.unusable import UnusableRows

    sources, base = config.sources, config.path(".")
    if not sources.names_users:
        return "to do", "[sources] interactions is not set: `larder init` looks for them"
    files = all_files(config)
    interactions = source_files(sources.interactions, base)[:FILES_COMPARED]
    demand_same_columns(interactions, sources)
    demand_times(sources, interactions, config.data_until)
    unusable = UnusableRows()
    batches, is_all = first_rows(read_interactions(sources, base, unusable=unusable))
    rows = sum(len(batch.times) for batch in batches)
    if sources.interactions and is_all and not unusable.to_json().get(INTERACTIONS):
        demand_least(0, 0)
    if sources.interactions and not rows:
        return "to do", f"no interaction in the first rows of {files[0]}: is every weight above 0?"
    if config.data_until and rows and is_all and not any(batch.times.any() for batch in batches):
        return "to do", chosen_cut_in_words(config.data_until)
    for name, columns in (
        (sources.item_features, (sources.item_column, *sources.item_attributes)),
        (sources.user_features, (sources.user_column,)),
        (sources.user_vectors, (sources.user_column, sources.vector_column)),
        (sources.item_vectors, (sources.item_column, sources.vector_column)),
    ):
        if name:
            feature_schema(source_file(name, base), columns)
            if not row_count(source_file(name, base)):
                return "to do", f"{name} has no rows: write them, or leave it out of [sources]"
    for demand_settings in setting_checks():
        demand_settings(config)
    with ExitStack() as stack:
        bundle = None
        if not sources.item_vectors:
            with suppress(BundleError, StoreError):  # the line on the bundle names it
                bundle = stack.enter_context(look_at_chosen(config))
        odd, is_refused = look_at_tables(config, bundle, batches, unusable)
    summary, refusal = f"{len(files)} file{'s' * (len(files) > 1)}", ""
    if not sources.interactions:
        users = sources.user_vectors or sources.user_features
        summary += f", none of interactions: users are those of {users}"
    else:
        shape = Shape.of_batch(batches[0])
        if len(batches) == 1 and is_all:
            demand_least(shape.users, shape.items)
            refusal = _refused_by_train(config, batches[0])
        odd = [*remarks(shape), *swapped_in_words(batches), *find_copy_remarks(interactions), *odd]
        summary += f"; {rows:,} interactions" + ("" if is_all else " in the first rows")
    for source, source_report in unusable.to_json().items():
        if source_report["left_out"]:
            of_source = "" if source == INTERACTIONS else f" of {source}"
            reasons_text = ", ".join(
                f"{reason['rows']:,} {reason_name}"
                for reason_name, reason in source_report["reasons"].items()
            )
            summary += f", {source_report['left_out']:,} rows{of_source} that cannot be used: {reasons_text}"
    told = "; ".join([summary, *unusable.all_remarks(), *odd])
    if refusal := _too_many_unusable(config, unusable, is_all=is_all) or refusal:
        return "to do", f"{refusal}; {told}"
    if is_refused:
        return "to do", f"ids of interactions and tables are not in one form; {told}"
    return "ok", told


def _refused_by_train(config: "NightConfig", rows: "Interactions") -> str:
    """Return why `larder train` would refuse to learn from these, all, interactions; empty if it would not."""
    from precompute.sources.plausibility import demand_several_items

    sources, users, items = config.sources, rows.users, rows.items
    if sources.item_vectors or sources.item_features or config.path(config.bundle).exists():
        return ""
    try:
        demand_several_items(users.codes, len(users.names), items.codes, len(items.names))
    except LarderError as error:
        return error.message
    return ""


def _too_many_unusable(config: "NightConfig", unusable: "UnusableRows", *, is_all: bool) -> str:
    """Return why the gate `unusable_rows` would refuse a night of what was read; empty if it would not."""
    from precompute.sources.readers import INTERACTIONS
    from precompute.sources.unusable import remedy, worst_source

    threshold, report = config.gates.unusable_rows, unusable.to_json()
    source, share = worst_source(report, threshold)
    if share <= threshold:
        return ""
    reasons_text = "; ".join(
        f"{reason_report['rows']:,} {reason}{remedy(reason)}"
        for reason, reason_report in report[source]["reasons"].items()
    )
    read_text = "" if is_all or source != INTERACTIONS else "first "
    return (
        f"{report[source]['left_out']:,} of the {read_text}{report[source]['rows']:,} rows of {source} cannot be used "
        f"({reasons_text}): a night refuses more than {threshold:.4g} of them ([gates] unusable_rows)"
    )


def look_at_bundle(config: "NightConfig") -> CheckResult:
    """Check the bundle: its checksums, whether its models open, and whether the sources have its features."""
    if line := missing_extra("a look at bundles", "precompute", *PRECOMPUTE_MODULES):
        return "not used", f"by the service; {line}"
    from precompute.builds.tables import demand_values
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import handed_over, is_superseded
    from precompute.bundles.imports import demand_finished_import
    from precompute.scoring.towers import demand_feature_types

    if config.sources.item_vectors:
        return "ok", f"made of {config.sources.item_vectors} by each night"
    folder = config.path(config.bundle)
    demand_finished_import(folder)
    if folder.exists():
        bundle = Bundle.open(folder)
        demand_values(config, bundle)
        demand_feature_types(config, bundle)
        handovers = handed_over(config.store())
        if is_superseded(bundle.digest, handovers):
            newest = handovers[-1].digest[:12]
            remedy = f"run `larder hand-over {folder}` for this one, or remove the folder"
            return (
                "to do",
                f"{folder} holds {bundle.digest[:12]}, but nights use {newest}, which followed it: {remedy}",
            )
        return "ok", f"{folder}: {bundle.name} {bundle.version}"
    if handovers := handed_over(config.store()):
        return "ok", f"{handovers[-1].digest[:12]}, handed over to the store"
    return "to do", f"none at {folder}: set `bundle`, or run `larder train`"


def look_at_redis(config: "NightConfig") -> CheckResult:
    """Check the Redis of pages: its version, its missing commands, and its eviction policy."""
    from redis import AuthenticationError, RedisError

    from cache.l2.errors import NO_USER
    from cache.l2.sync_clients import masters, open_client
    from cache.process.redis_server import find_server, running_server
    from precompute.cli.temporary_redis import gone_in_words

    running_redis = running_server(config.path(config.state))
    url = config.redis_url or (running_redis.url if running_redis else None)
    if url is None and (gone := gone_in_words(config.path(config.state))):
        return "to do", gone
    if url is None:
        return (
            "ok",
            f"none is configured: each command runs {find_server()} for as long as it lasts (`larder redis`)",
        )
    try:
        client = open_client(url, protocol=2, socket_timeout=REDIS_TIMEOUT_S)
        try:
            servers = masters(client).values()
            policies = {
                str(server.info("memory").get("maxmemory_policy", "")) for server in servers
            }
            kinds = sorted({redis_kind_of(server) for server in servers})
            keys = Keyspace(config.namespace)
            is_fit = not any(kind.missing for kind in kinds)
            lacks = _refused(client, _commands_of_nights(keys)) if is_fit else []
            is_reader = bool(lacks) and not _refused(client, _commands_of_services(keys))
        finally:
            client.close()
    except AuthenticationError as error:
        no_user = "" if urlsplit(url).username else NO_USER
        return (
            "to do",
            f"{place_of(url)} refuses user and password: {error}; correct REDIS_URL{no_user}",
        )
    except (RedisError, ValueError, OSError) as error:
        return (
            "to do",
            f"{place_of(url)} cannot be used: {error}; is REDIS_URL right, and does it run?",
        )
    if unfit := sorted(policy for policy in policies if policy.startswith("allkeys")):
        return "to do", f"maxmemory-policy {unfit[0]} may evict published pages: set volatile-lru"
    for kind in kinds:
        if kind.missing:
            return "to do", f"{place_of(url)} is {kind}, which has no {', no '.join(kind.missing)}"
    if lacks and not is_reader:
        return "to do", _missing_rights(url, config.namespace, lacks)
    summary = (
        f"{place_of(url)}{'' if config.redis_url else ', of `larder redis` or another command'}; "
    )
    summary += ", ".join(map(str, kinds))
    without = sorted({lacking_command for kind in kinds for lacking_command in kind.without})
    if is_reader:
        summary += (
            f"; its user may serve, not load ({', '.join(lacks)} refused): nights need another one"
        )
    return "ok", summary + "".join(f"; without {lacking_command}" for lacking_command in without)


def _commands_of_nights(keys: Keyspace) -> tuple[tuple[str, ...], ...]:
    """Commands on the way of a load, on a page and a control key that no generation has and that are removed again."""
    page, control = keys.page("check", "check", 0), f"{keys.generations}:check"
    return (
        ("GET", keys.live), ("HGETALL", keys.generations),
        ("ZRANGEBYSCORE", keys.replicas, "+inf", "+inf"), ("EVAL", FLAGGED_SCRIPT, "1", keys.live),
        ("SET", page, "x", "EX", "60"), ("SETRANGE", page, "0", "x"), ("GETRANGE", page, "0", "0"),
        ("STRLEN", page), ("UNLINK", page), ("HSET", control, "x", "x"), ("HDEL", control, "x"),
    )  # fmt: skip


def _commands_of_services(keys: Keyspace) -> tuple[tuple[str, ...], ...]:
    """Commands on the way of an answer."""
    return (
        ("GET", keys.live), ("GETRANGE", keys.page("check", "check", 0), "0", "0"),
        ("SET", keys.overlay("check", "check", "0"), "x", "PX", "1"),
        ("EVAL", FLAGGED_SCRIPT, "1", keys.replicas),
    )  # fmt: skip


def _refused(client: "redis.Redis", commands: Sequence[tuple[str, ...]]) -> list[str]:
    """Run the commands; return the names of those that the user has no right to."""
    from redis.exceptions import NoPermissionError, OutOfMemoryError

    names = []
    for command in commands:
        try:
            client.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoPermissionError:
            names.append(command[0])
        except OutOfMemoryError:
            pass  # of a full server a load says more
    return names


def _missing_rights(url: str, namespace: str, names: Sequence[str]) -> str:
    user = urlsplit(url).username or "default"
    rights = " ".join(f"+{name.lower()}" for name in dict.fromkeys(names))
    question = "is LARDER_NAMESPACE right? If it is, " if "GET" in names else ""
    patterns = (
        f"~larder:{KEYSPACE_VERSION}:{{{namespace}}}:* ~larder:{KEYSPACE_VERSION}:{namespace}:g:*"
    )
    return (
        f"{place_of(url)} refuses {', '.join(names)} to its user {user} in the namespace {namespace}: {question}give "
        "it the line `user larder-loader` of infra/redis.conf with this namespace, at least ACL SETUSER "
        f"{user} {patterns} {rights}"
    )


def look_at_events(config: "NightConfig") -> CheckResult:
    """Check the durability of the Redis of events against the settings."""
    if not config.events.enabled:
        return "not used", "[events] enabled is false: no service takes events in"
    from cache.process.redis_server import running_server

    running_redis = running_server(config.path(config.state))
    url = config.events_redis or (running_redis.url if running_redis else "")
    if not url:
        return "ok", "in the Redis that each command runs for as long as it lasts: gone with it"
    try:
        durability, policy = asyncio.run(_look_at_durability(url, config))
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
    if not durability.suffices(demanded):
        summary = f"durability = {demanded!r} is demanded, and {place_of(url)} has {durability.persistence!r}"
        return "to do", f"{summary}: set appendonly yes and appendfsync {demanded} there"
    summary = f"{place_of(url)}; durability {durability.persistence}, maxmemory-policy {policy or 'not told'}"
    return "ok", summary + (
        ", which may evict ids of events: a repetition may count" if may_evict_ids else ""
    )


async def _look_at_durability(url: str, config: "NightConfig") -> "tuple[FoundDurability, str]":
    from serving.events.connection import EventsRedis

    redis = EventsRedis(url, config.events.durability)
    try:
        durability = await redis.refresh_durability()
        policy = await redis.eviction_policy()
    finally:
        await redis.aclose()
    return durability, policy


def look_at_live(_config: "NightConfig") -> CheckResult:
    """Check the provider of the live models."""
    from cache.config.serving import ServingConfig

    provider = ServingConfig.load(os.environ).live_provider
    if provider == "cpu":
        return "not used", "live_provider is cpu: live models run on the processor"
    from cache.model.runtime import Accelerator

    if (missing_reason := Accelerator(provider).missing()) is not None:
        return (
            "to do",
            f"live models would run on the processor: {missing_reason}, or set live_provider to cpu",
        )
    return (
        "ok",
        f"{provider}; whether models could be loaded there, `fallback` of /v1/generations says",
    )


def look_at_store(config: "NightConfig") -> CheckResult:
    """Check whether the artefact store is that of Redis' pointer, and creates files exclusively."""
    from cache.control.own_store import foreign_store
    from cache.process.redis_server import running_server

    running_redis = running_server(config.path(config.state))
    url = config.redis_url or (running_redis.url if running_redis else None)
    if (mismatch := foreign_store(config, url, REDIS_TIMEOUT_S)) is not None:
        return "to do", mismatch
    store = config.store()
    store.demand_write_once()
    count = len(store.names("generations"))
    return (
        "ok",
        f"{config.artifacts}: {count} generation{'s' * (count != 1)} in namespace {config.namespace}",
    )


def look_at_airflow(_config: "NightConfig") -> CheckResult:
    """Check the DAG files of an Airflow installation."""
    if missing_extra("a night", "airflow", "airflow"):
        return (
            "not used",
            "Airflow is not installed here: `larder night` runs a night, from cron for instance",
        )
    installed = airflow_version()
    refusal = None if installed is None else airflow_refusal(installed)
    try:
        folder = dags_folder(None)
    except LarderError:
        return (
            "not used",
            refusal
            or "no AIRFLOW_HOME: `larder dags install FOLDER` adds the nights to an Airflow",
        )
    if refusal is not None:
        return "to do", refusal
    states = {file.target: file.state() for file in files_in(folder)}
    for target, state in states.items():
        if state in ("older", "changed", "foreign", "missing"):
            return "to do", f"{target}: {_DAG_FILE_STATES[state]}; `larder dags install`"
    return (
        "ok",
        f"{len(states)} DAGs in {Path(folder)}, Airflow {installed or 'of unknown version'}",
    )


def look_at_lineage(_config: "NightConfig") -> CheckResult:
    """Check the settings of OpenLineage."""
    if not any(os.environ.get(name) for name in LINEAGE_TRANSPORTS):
        return "not used", f"no transport for OpenLineage's events, such as {LINEAGE_TRANSPORTS[0]}"
    try:
        version(_LINEAGE_PROVIDER)  # its module could only be found by importing Airflow
    except PackageNotFoundError:
        return (
            "to do",
            f"lineage needs {_LINEAGE_PROVIDER}, not installed here: {install_command('lineage')}",
        )
    if _LINEAGE_EXTRACTOR not in map(str.strip, os.environ.get(_LINEAGE_EXTRACTORS, "").split(";")):
        return (
            "to do",
            f"events say nothing of data: set {_LINEAGE_EXTRACTORS}={_LINEAGE_EXTRACTOR}",
        )
    return (
        "ok",
        "each task of a night sends OpenLineage's events, where Airflow has this environment",
    )


CHECKS: dict[str, Callable[["NightConfig"], CheckResult]] = {
    "sources": look_at_sources,
    "bundle": look_at_bundle,
    "redis": look_at_redis,
    "events": look_at_events,
    "live": look_at_live,
    "store": look_at_store,
    "airflow": look_at_airflow,
    "lineage": look_at_lineage,
}


class RedisKind(NamedTuple):
    """Product and version of a server, its missing requirements, and its missing dispensable commands."""

    name: str
    version: str
    missing: tuple[str, ...]
    without: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def redis_kind_of(server: "redis.Redis") -> RedisKind:
    """Inspect one server by INFO, a script and COMMAND INFO; a command that this user may not run counts as supported.

    Raises redis.ResponseError if the server refuses to run scripts at the moment.
    """
    from redis.exceptions import NoPermissionError, ResponseError

    from cache.l2.resp import WrongReply, refuse_reply

    server_info: dict[str, Any] = server.info("server")
    name, version = _product_and_version(server_info)
    missing = []
    try:
        server.eval(FLAGGED_SCRIPT, 0)
    except NoPermissionError:
        pass
    except ResponseError as error:
        # All else (a read-only replica, a disk that is full) is no matter of its version: who asked tells it.
        if type(error) is not ResponseError or not _SCRIPT_REFUSED.search(str(error)):
            raise
        missing.append("scripts with flags (Redis 7.0, Valkey and newer have them)")
    names = (*NEEDED_COMMANDS, *DISPENSABLE_COMMANDS)
    try:
        command_infos: Any = server.execute_command("COMMAND INFO", *names)  # type: ignore[no-untyped-call]
        if len(command_infos) != len(names):
            refuse_reply("COMMAND INFO", command_infos, "as many commands as were asked for")
    except WrongReply:
        raise
    except ResponseError:
        command_infos = names
    known_commands = {
        name for name, command_info in zip(names, command_infos, strict=True) if command_info
    }
    missing += [command.upper() for command in NEEDED_COMMANDS if command not in known_commands]
    # Events wait for the disk only where no setting tells how durable they are.
    lacking = (
        ()
        if "config" in known_commands
        else [command for command in DISPENSABLE_COMMANDS if command not in known_commands]
    )
    without = [f"{command.upper()} ({DISPENSABLE_COMMANDS[command]})" for command in lacking]
    return RedisKind(name, version, tuple(missing), tuple(without))


def _product_and_version(server_info: dict[str, Any]) -> tuple[str, str]:
    if "dragonfly_version" in server_info:
        return "Dragonfly", str(server_info["dragonfly_version"]).removeprefix("df-").removeprefix(
            "v"
        )
    if server_info.get("server_name") == "valkey":
        return "Valkey", str(server_info.get("valkey_version", ""))
    # KeyDB calls itself Redis in all but the name of its program.
    is_keydb = "keydb" in str(server_info.get("executable", ""))
    return "KeyDB" if is_keydb else "Redis", str(server_info.get("redis_version", ""))
