"""`larder check`: checks the requirements of a night and the service; each is `ok`, `to do` or `not used`.

Checks import precompute, serving and cache in their functions, because their extras may be missing.
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
    FOUND_PROBLEM_EXIT_CODE,
    PRECOMPUTE_MODULES,
    SERVING_MODULES,
    install_command,
    json_text,
    missing_extra,
    printable_lines,
)
from infra.cli.commands import read_night_settings
from infra.cli.dags import (
    POOL_COMMAND,
    SCORING_POOL,
    airflow_refusal,
    airflow_version,
    dags_folder,
    has_scoring_pool,
    list_dag_files,
    names_dags_folder,
)
from infra.cli.redis import url_without_password

if TYPE_CHECKING:
    import redis

    from cache.config.night import NightConfig
    from precompute.bundles.bundle import Bundle
    from precompute.sources.readers import Interactions
    from precompute.sources.unusable import UnusableRows
    from serving.events.connection import EventsRedis, FoundDurability, MemoryUse

CheckState = Literal["ok", "to do", "not used"]

CheckResult = tuple[CheckState, str]
"""State of a check, and a text with its finding or remedy."""

FILES_COMPARED_MAX = 1_000
"""Number of source files whose columns the check compares; a night compares those of all files."""

REDIS_TIMEOUT_S = 3.0

NEEDED_COMMANDS: Final = tuple(
    """del eval evalsha exists expire get getrange hdel hget hgetall hlen hset incr info memory mget pexpire pfadd
    pfcount ping pttl publish script set setrange strlen subscribe time unlink unsubscribe wait xack xadd xautoclaim
    xdel xgroup xinfo xlen xrange xread xreadgroup xrevrange xtrim zadd zincrby zrangebyscore zrem zremrangebyrank
    zremrangebyscore zrevrange""".split()  # noqa: SIM905  # fifty words, one a line
)
"""Redis commands that nights, the service or events need."""

LACK_EFFECT_BY_COMMAND: Final = {
    "config": "settings are read from INFO, and the durability of events is tested with WAITAOF",
    "waitaof": "without CONFIG as well, no event is known to be durable",
    "bgrewriteaof": "erased events stay in the append-only file until Redis rewrites it by itself",
}
"""Optional Redis commands -> the consequence if the server lacks the command."""

FLAGGED_SCRIPT: Final = "#!lua flags=allow-oom\nreturn 1"
"""Script with flags; Larder's scripts for the pointer and heartbeats need them in order to run at maxmemory."""

_SCRIPT_REFUSED_PATTERN: Final = re.compile("compil|flag|shebang|unknown command", re.IGNORECASE)
"""Pattern in the error of a server that does not support scripts with flags."""

LINEAGE_TRANSPORTS = (
    "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__CONFIG_PATH", "OPENLINEAGE_URL", "OPENLINEAGE_CONFIG",
)  # fmt: skip
"""Environment variables that configure a transport for lineage events."""

_LINEAGE_PROVIDER = "apache-airflow-providers-openlineage"
_LINEAGE_EXTRACTORS = "AIRFLOW__OPENLINEAGE__EXTRACTORS"
_LINEAGE_EXTRACTOR = "infra.lineage.extractor.NightExtractor"

_DAG_FILE_STATE_TEXTS = {
    "missing": "missing",
    "older": "from another release",
    "changed": "edited since its installation",
    "foreign": "not written by Larder",
}


class CheckLine(NamedTuple):
    """State of one checked subject (`what`), with its finding or remedy (`told`)."""

    what: str
    state: CheckState
    told: str


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run all checks; return exit code 0 if there is nothing to do, 3 otherwise."""
    args = argument_parser(prog).parse_args(argv)
    check_lines = [_run_check("settings", _check_settings)]
    if check_lines[0].state == "ok":
        check_lines = [_run_check("settings", partial(_check_service_settings, check_lines[0].told))]
        config = read_night_settings()
        check_lines += [_run_check(subject, partial(check, config)) for subject, check in CHECK_BY_SUBJECT.items()]
    if args.json:
        print(printable_lines(json_text([check_line._asdict() for check_line in check_lines])))
    else:
        for check_line in check_lines:
            print(printable_lines(f"{check_line.state:<9} {check_line.what:<9} {check_line.told}"))
    return FOUND_PROBLEM_EXIT_CODE if any(check_line.state == "to do" for check_line in check_lines) else 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Check settings, sources, bundle, Redis, the Redis of events, the provider of live models, the "
        "artefact store, Airflow and lineage; print for each ok, not used, or to do with a remedy. The only change "
        "made is to create the store's folder, unless Redis belongs to another store. Exit code: 0 nothing to do, 3 "
        "something to do.",
    )
    parser.add_argument("--json", action="store_true", help="print the states as JSON")
    return parser


def _run_check(subject: str, run_check: Callable[[], CheckResult]) -> CheckLine:
    try:
        return CheckLine(subject, *run_check())
    except LarderError as error:
        return CheckLine(subject, "to do", error.message)
    except OSError as error:
        return CheckLine(subject, "to do", f"this machine refused: {error}")


def _check_settings() -> CheckResult:
    """Check the settings of night and service, from the file and the environment."""
    from cache.config.serving import ServingConfig
    from cache.config.variables import unknown_variables

    read_night_settings()
    ServingConfig.load(os.environ)
    settings_file = os.environ.get("LARDER_CONFIG")
    if not settings_file:
        return "to do", "no larder.toml here, and no LARDER_CONFIG: `larder init` writes one"
    unknown_names = unknown_variables(os.environ)
    return "ok", f"{settings_file}; not read: {', '.join(unknown_names)}" if unknown_names else settings_file


def _check_service_settings(settings_text: str) -> CheckResult:
    """Raise the ConfigError for which `larder serve` would not start, or callers would refuse its certificate."""
    if not missing_extra("the check of the service's settings", "serving", *SERVING_MODULES):
        from serving.config.settings import ServingConfig
        from serving.process.start_check import check_certificate_dates, check_startable

        check_startable(service_config := ServingConfig.load(os.environ))
        check_certificate_dates(service_config)
    return "ok", settings_text


def check_sources(config: "NightConfig") -> CheckResult:
    """Check the files of the sources, and their first rows."""
    if missing_extra_text := missing_extra("the check of sources", "precompute", *PRECOMPUTE_MODULES):
        return "not used", f"by the service; {missing_extra_text}"
    from precompute.bundles.bundle_store import preview_chosen_bundle
    from precompute.features import setting_checks
    from precompute.partitions.table_look import preview_tables, read_first_batches
    from precompute.sources.files import all_input_files, find_copy_remarks, source_file, source_files
    from precompute.sources.plausibility import (
        InteractionFigures,
        chosen_cut_in_words,
        demand_enough_ids,
        demand_times,
        plausibility_remarks,
        swapped_columns_remarks,
    )
    from precompute.sources.readers import (
        INTERACTIONS_SOURCE,
        demand_same_columns,
        feature_schema,
        read_interactions,
        row_count,
    )
    from precompute.sources.unusable import UnusableRows

    sources, base_folder = config.sources, config.path(".")
    if not sources.names_users:
        return "to do", "[sources] interactions is not set: `larder init` finds them"
    all_source_files = all_input_files(config)
    interaction_files = source_files(sources.interactions, base_folder)[:FILES_COMPARED_MAX]
    demand_same_columns(interaction_files, sources)
    demand_times(sources, interaction_files, config.data_until)
    unusable_rows = UnusableRows()
    batches, is_all_read = read_first_batches(read_interactions(sources, base_folder, unusable_rows=unusable_rows))
    interaction_count = sum(len(batch.times_us) for batch in batches)
    if sources.interactions and is_all_read and not unusable_rows.to_json().get(INTERACTIONS_SOURCE):
        demand_enough_ids(0, 0)
    if sources.interactions and not interaction_count:
        return ("to do", f"no interaction in the first rows of {all_source_files[0]}: is every weight above 0?")
    if config.data_until and interaction_count and is_all_read and not any(batch.times_us.any() for batch in batches):
        return "to do", chosen_cut_in_words(config.data_until)
    for table_name, column_names in (
        (sources.item_features, (sources.item_column, *sources.item_attributes)),
        (sources.user_features, (sources.user_column,)),
        (sources.user_vectors, (sources.user_column, sources.vector_column)),
        (sources.item_vectors, (sources.item_column, sources.vector_column)),
    ):
        if table_name:
            feature_schema(source_file(table_name, base_folder), column_names)
            if not row_count(source_file(table_name, base_folder)):
                return ("to do", f"{table_name} has no rows: add rows, or remove the file from [sources]")
    for demand_settings in setting_checks():
        demand_settings(config)
    with ExitStack() as bundle_stack:
        bundle = None
        if not sources.item_vectors:
            with suppress(BundleError, StoreError):  # check_bundle reports the error
                bundle = bundle_stack.enter_context(preview_chosen_bundle(config))
        oddity_remarks, is_refused = preview_tables(config, bundle, batches, unusable_rows)
    summary, refusal = f"{len(all_source_files)} file{'s' * (len(all_source_files) > 1)}", ""
    if not sources.interactions:
        users_table = sources.user_vectors or sources.user_features
        summary += f", none of them of interactions: users are those of {users_table}"
    else:
        data_shape = InteractionFigures.of_batch(batches[0])
        if len(batches) == 1 and is_all_read:
            demand_enough_ids(data_shape.user_count, data_shape.item_count)
            refusal = _train_refusal(config, batches[0])
        oddity_remarks = [
            *plausibility_remarks(data_shape),
            *swapped_columns_remarks(batches),
            *find_copy_remarks(interaction_files),
            *oddity_remarks,
        ]
        summary += f"; {interaction_count:,} interactions" + ("" if is_all_read else " in the first rows")
    for source_name, source_report in unusable_rows.to_json().items():
        if source_report["left_out"]:
            source_clause = "" if source_name == INTERACTIONS_SOURCE else f" of {source_name}"
            reasons_text = ", ".join(
                f"{reason['rows']:,} {reason_name}" for reason_name, reason in source_report["reasons"].items()
            )
            summary += f", {source_report['left_out']:,} rows{source_clause} that cannot be used: {reasons_text}"
    finding_text = "; ".join([summary, *unusable_rows.remarks_of_all(), *oddity_remarks])
    if refusal := _unusable_rows_refusal(config, unusable_rows, is_all=is_all_read) or refusal:
        return "to do", f"{refusal}; {finding_text}"
    if is_refused:
        return "to do", f"interactions and tables have ids of different forms; {finding_text}"
    return "ok", finding_text


def _train_refusal(config: "NightConfig", interactions: "Interactions") -> str:
    """Return why `larder train` would refuse `interactions`, which must be all of them; empty if it would not."""
    from precompute.sources.plausibility import demand_several_items

    sources, users, items = config.sources, interactions.user_ids, interactions.item_ids
    if sources.item_vectors or sources.item_features or config.path(config.bundle).exists():
        return ""
    try:
        demand_several_items(users.id_codes, len(users.distinct_ids), items.id_codes, len(items.distinct_ids))
    except LarderError as error:
        return error.message
    return ""


def _unusable_rows_refusal(config: "NightConfig", unusable: "UnusableRows", *, is_all: bool) -> str:
    """Return why the gate `unusable_rows` would refuse a night of the rows read so far; empty if it would not."""
    from precompute.sources.readers import INTERACTIONS_SOURCE
    from precompute.sources.unusable import find_worst_source, remedy

    threshold, report_by_source = config.gates.unusable_rows, unusable.to_json()
    worst_source_name, unusable_share = find_worst_source(report_by_source, threshold)
    if unusable_share <= threshold:
        return ""
    reasons_text = "; ".join(
        f"{reason_report['rows']:,} {reason}{remedy(reason)}"
        for reason, reason_report in report_by_source[worst_source_name]["reasons"].items()
    )
    first_text = "" if is_all or worst_source_name != INTERACTIONS_SOURCE else "first "
    return (
        f"{report_by_source[worst_source_name]['left_out']:,} of the "
        f"{first_text}{report_by_source[worst_source_name]['rows']:,} rows of {worst_source_name} cannot be used "
        f"({reasons_text}): a night refuses more than {threshold:.4g} of them ([gates] unusable_rows)"
    )


def check_bundle(config: "NightConfig") -> CheckResult:
    """Check the bundle: its checksums, whether its models open, and whether the sources have its features."""
    if missing_extra_text := missing_extra("the check of bundles", "precompute", *PRECOMPUTE_MODULES):
        return "not used", f"by the service; {missing_extra_text}"
    from precompute.bundles.bundle import Bundle
    from precompute.bundles.bundle_store import all_handovers, is_superseded, preview_chosen_bundle
    from precompute.bundles.imports import demand_finished_import

    if config.sources.item_vectors:
        return "ok", f"each night makes it from {config.sources.item_vectors}"
    bundle_folder = config.path(config.bundle)
    demand_finished_import(bundle_folder)
    if not bundle_folder.exists():
        with preview_chosen_bundle(config) as handed_over_bundle:
            if handed_over_bundle is None:
                return "to do", f"none at {bundle_folder}: set `bundle`, or run `larder train`"
            handed_over_bundle.try_models()
            _demand_fit(config, handed_over_bundle)
            return "ok", f"{handed_over_bundle.digest[:12]}, handed over to the store"
    bundle = Bundle.open(bundle_folder)
    _demand_fit(config, bundle)
    if is_superseded(bundle.digest, handovers := all_handovers(config.store())):
        return "to do", (
            f"{bundle_folder} holds {bundle.digest[:12]}, but nights use {handovers[-1].bundle_digest[:12]}, which "
            f"followed it: run `larder hand-over {bundle_folder}` for this one, or remove the folder"
        )
    return "ok", f"{bundle_folder}: {bundle.name} {bundle.version}"


def _demand_fit(config: "NightConfig", bundle: "Bundle") -> None:
    """Raise the error for which `begin` would refuse the bundle with these tables and sources."""
    from precompute.builds.tables import demand_histories, demand_table_values
    from precompute.scoring.towers import demand_feature_types

    demand_table_values(config, bundle)
    demand_feature_types(config, bundle)
    if config.sources.names_users:
        demand_histories(config, bundle)


def check_device(config: "NightConfig") -> CheckResult:
    """Check that the device of the settings is there, on which nights of this host score."""
    if missing_extra_text := missing_extra("the check of the device", "precompute", *PRECOMPUTE_MODULES):
        return "not used", f"by the service; {missing_extra_text}"
    from precompute.config.devices import devices

    device_names = devices(config.device)
    return "ok", f"device is {config.device}: nights score on {', '.join(device_names) or 'the processor'}"


def check_redis(config: "NightConfig") -> CheckResult:
    """Check the Redis of pages: version, missing commands, rights of its user, and eviction policy."""
    from redis import AuthenticationError, RedisError

    from cache.l2.errors import NO_USER_HINT, describe_connection_error
    from cache.l2.sync_clients import open_client, primary_clients
    from cache.process.redis_server import find_server, running_server
    from precompute.cli.temporary_redis import describe_ended_redis

    running_redis = running_server(config.path(config.state))
    server_url = config.redis_url or (running_redis.url if running_redis else None)
    if server_url is None and (ended_redis_text := describe_ended_redis(config.path(config.state))):
        return "to do", ended_redis_text
    if server_url is None:
        return (
            "ok",
            f"none is configured: each command starts {find_server()}, which ends with it (or run `larder redis`)",
        )
    try:
        client = open_client(server_url, protocol=2, socket_timeout=REDIS_TIMEOUT_S)
        try:
            servers = primary_clients(client).values()
            eviction_policies = {str(server.info("memory").get("maxmemory_policy", "")) for server in servers}
            redis_kinds = sorted({inspect_redis(server) for server in servers})
            keys = Keyspace(config.namespace)
            has_all_commands = not any(redis_kind.missing_requirements for redis_kind in redis_kinds)
            refused_commands = _find_refused_commands(client, _commands_of_nights(keys)) if has_all_commands else []
            may_only_serve = bool(refused_commands) and not _find_refused_commands(client, _commands_of_services(keys))
        finally:
            client.close()
    except AuthenticationError as error:
        no_user_remark = "" if urlsplit(server_url).username else NO_USER_HINT
        return (
            "to do",
            f"{url_without_password(server_url)} rejects user or password: {error}; correct REDIS_URL{no_user_remark}",
        )
    except (RedisError, ValueError, OSError) as error:
        error_text = describe_connection_error(error)
        return (
            "to do",
            f"{url_without_password(server_url)} cannot be used: {error_text}; is REDIS_URL right, and is it running?",
        )
    if unfit_policies := sorted(policy for policy in eviction_policies if policy.startswith("allkeys")):
        return ("to do", f"maxmemory-policy {unfit_policies[0]} may evict published pages: set volatile-lru")
    for redis_kind in redis_kinds:
        if redis_kind.missing_requirements:
            lacks_text = ", no ".join(redis_kind.missing_requirements)
            return "to do", f"{url_without_password(server_url)} is {redis_kind}, which has no {lacks_text}"
    if refused_commands and not may_only_serve:
        return "to do", _missing_rights_text(server_url, config.namespace, refused_commands)
    origin_text = "" if config.redis_url else ", started by `larder redis` or another command"
    summary = f"{url_without_password(server_url)}{origin_text}; {', '.join(map(str, redis_kinds))}"
    lacking_commands = sorted(
        {lacking_command for redis_kind in redis_kinds for lacking_command in redis_kind.absent_optional_commands}
    )
    if may_only_serve:
        summary += (
            f"; its user can serve but not load ({', '.join(refused_commands)} refused): nights need another user"
        )
    return "ok", summary + "".join(f"; without {lacking_command}" for lacking_command in lacking_commands)


def _commands_of_nights(keys: Keyspace) -> tuple[tuple[str, ...], ...]:
    """Return commands that a load needs, on a page and a control key that no generation uses; the keys are removed."""
    page_key, control_key = keys.page("check", "check", 0), f"{keys.generations}:check"
    return (
        ("GET", keys.live), ("HGETALL", keys.generations),
        ("ZRANGEBYSCORE", keys.replicas, "+inf", "+inf"), ("EVAL", FLAGGED_SCRIPT, "1", keys.live),
        ("SET", page_key, "x", "EX", "60"), ("SETRANGE", page_key, "0", "x"), ("GETRANGE", page_key, "0", "0"),
        ("STRLEN", page_key), ("UNLINK", page_key), ("HSET", control_key, "x", "x"), ("HDEL", control_key, "x"),
    )  # fmt: skip


def _commands_of_services(keys: Keyspace) -> tuple[tuple[str, ...], ...]:
    """Return commands that the service needs to answer."""
    return (
        ("GET", keys.live), ("GETRANGE", keys.page("check", "check", 0), "0", "0"),
        ("SET", keys.overlay("check", "check", "0"), "x", "PX", "1"),
        ("EVAL", FLAGGED_SCRIPT, "1", keys.replicas),
    )  # fmt: skip


def _find_refused_commands(client: "redis.Redis", commands: Sequence[tuple[str, ...]]) -> list[str]:
    """Run the commands; return the names of those for which the user lacks permission."""
    from redis.exceptions import NoPermissionError, OutOfMemoryError

    refused_names = []
    for command in commands:
        try:
            client.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoPermissionError:
            refused_names.append(command[0])
        except OutOfMemoryError:
            pass  # a load reports a full server in more detail
    return refused_names


def _missing_rights_text(url: str, namespace: str, command_names: Sequence[str]) -> str:
    user_name = urlsplit(url).username or "default"
    command_rights = " ".join(f"+{command_name.lower()}" for command_name in dict.fromkeys(command_names))
    question = "is LARDER_NAMESPACE right? If it is, " if "GET" in command_names else ""
    key_patterns = f"~larder:{KEYSPACE_VERSION}:{{{namespace}}}:* ~larder:{KEYSPACE_VERSION}:{namespace}:g:*"
    return (
        f"{url_without_password(url)} refuses {', '.join(command_names)} to its user {user_name} in the "
        f"namespace {namespace}: {question}give "
        "the user the rights of `larder-loader` in infra/redis.conf with this namespace, at least ACL SETUSER "
        f"{user_name} {key_patterns} {command_rights}"
    )


def check_events(config: "NightConfig") -> CheckResult:
    """Check the durability of the Redis of events against the settings."""
    if not config.events.enabled:
        return "not used", "[events] enabled is false: the service accepts no events"
    from cache.process.redis_server import running_server
    from serving.events.connection import WritesRefused

    running_redis = running_server(config.path(config.state))
    server_url = config.events_redis_url or (running_redis.url if running_redis else "")
    if not server_url:
        return "ok", "in the Redis that each command starts: events are lost when the command ends"
    try:
        events_server = asyncio.run(_inspect_events_server(server_url, config))
    except WritesRefused as error:
        return "to do", f"every event is refused with 503: {url_without_password(server_url)}: {error.message}"
    except LarderError as error:
        return (
            "to do",
            (
                f"{url_without_password(server_url)} cannot be used: {error.message}; is LARDER_EVENTS_URL "
                "right, and is the server running?"
            ),
        )
    durability, eviction_policy = events_server.durability, events_server.eviction_policy
    if eviction_policy.startswith("allkeys"):
        return (
            "to do",
            f"maxmemory-policy {eviction_policy} may evict events: set "
            + ("noeviction" if config.events_url else "volatile-lru"),
        )
    may_evict_ids = eviction_policy.startswith("volatile")
    if may_evict_ids and config.events_url:
        return (
            "to do",
            f"maxmemory-policy {eviction_policy} may evict the ids that reveal repeated events: set noeviction",
        )
    demanded_durability = config.events.durability
    if not durability.suffices(demanded_durability):
        summary = (
            f"durability = {demanded_durability!r} is required, but {url_without_password(server_url)} has "
            f"{durability.persistence!r}"
        )
        return "to do", f"{summary}: set appendonly yes and appendfsync {demanded_durability} there"
    if (full_text := events_server.full_text(config.events.stream_bytes)) is not None:
        return "to do", f"every event is refused with 429: {url_without_password(server_url)} {full_text}"
    summary = (
        f"{url_without_password(server_url)}; durability {durability.persistence}, maxmemory-policy "
        f"{eviction_policy or 'not reported'}"
    )
    if may_evict_ids:
        summary += ", which may evict ids of events: a repeated event may count twice"
    refused_to_nights, refused_to_services = events_server.refused_to_nights, events_server.refused_to_services
    if refused_to_nights and refused_to_services:
        refused_text = ", ".join(dict.fromkeys(refused_to_nights + refused_to_services))
        return "to do", (
            f"{url_without_password(server_url)} refuses {refused_text} to its user: nights need the rights of "
            "`larder-loader`, services those of `larder-reader` in infra/redis-events.conf; is LARDER_NAMESPACE right?"
        )
    if refused_to_nights:
        summary += (
            f"; its user can accept events but not give them to nights ({', '.join(refused_to_nights)} refused): "
            "nights need another user"
        )
    if refused_to_services:
        summary += (
            f"; its user can give events to nights but not accept any ({', '.join(refused_to_services)} refused): "
            "services need another user"
        )
    return "ok", summary


class _EventsServer(NamedTuple):
    """Findings about a Redis of events that answers and accepts writes."""

    durability: "FoundDurability"
    eviction_policy: str
    memory: "MemoryUse"
    stream_bytes: int
    refused_to_nights: list[str]
    """Names of commands of nights for which the user lacks permission."""
    refused_to_services: list[str]
    """Names of commands of services for which the user lacks permission."""

    def full_text(self, stream_bytes_max: int) -> str | None:
        """Say why it accepts no further events, with the remedy; None if it has room."""
        if self.memory.is_full:
            return (
                f"is at its maxmemory ({self.memory.used_bytes:,} of {self.memory.limit_bytes:,} bytes): run `larder "
                "night`, which makes room; if it fills up again, raise its maxmemory to more than twice [events] "
                "stream_bytes, or send fewer events"
            )
        if self.stream_bytes >= stream_bytes_max:
            return (
                f"holds a stream of {self.stream_bytes:,} bytes, and [events] stream_bytes is {stream_bytes_max:,}: "
                "run `larder night`, which makes room; if it fills up again, raise stream_bytes and its maxmemory"
            )
        return None


async def _inspect_events_server(url: str, config: "NightConfig") -> _EventsServer:
    from serving.events.connection import NEVER_AN_ENTRY_ID, EventsRedis

    events_redis, keys = EventsRedis(url, config.events.durability), config.of_events().keyspace()
    commands_of_nights = (
        ("XRANGE", keys.events, "-", "+", "COUNT", "1"), ("XREVRANGE", keys.events, "+", "-", "COUNT", "1"),
        ("XDEL", keys.events, NEVER_AN_ENTRY_ID), ("XTRIM", keys.events, "MINID", NEVER_AN_ENTRY_ID),
        ("XDEL", keys.rejected_events, NEVER_AN_ENTRY_ID),
    )  # fmt: skip
    commands_of_services = (
        ("EVAL", "return 1", "1", keys.events), ("XLEN", keys.events),
        ("XREADGROUP", "GROUP", "check", "check", "COUNT", "1", "STREAMS", keys.inbox, ">"),
    )  # fmt: skip
    try:
        await events_redis.demand_writes(keys.inbox)
        return _EventsServer(
            await events_redis.refresh_durability(),
            await events_redis.eviction_policy(),
            await events_redis.memory_use(),
            int(await events_redis.execute("MEMORY USAGE", keys.events, "SAMPLES", 5) or 0),
            await _find_refused_event_commands(events_redis, commands_of_nights),
            await _find_refused_event_commands(events_redis, commands_of_services),
        )
    finally:
        await events_redis.aclose()


async def _find_refused_event_commands(events_redis: "EventsRedis", commands: Sequence[tuple[str, ...]]) -> list[str]:
    """Run commands that change nothing; return the names of those for which the user lacks permission."""
    from redis.exceptions import NoPermissionError

    from serving.events.connection import EventsUnavailable

    refused_names = []
    for command in commands:
        try:
            await events_redis.execute(*command)
        except EventsUnavailable as error:  # another cause is that the inbox has no such group
            if isinstance(error.__cause__, NoPermissionError):
                refused_names.append(command[0])
    return list(dict.fromkeys(refused_names))


def check_live_provider(_config: "NightConfig") -> CheckResult:
    """Check that the execution provider of the live models is available."""
    from cache.config.serving import ServingConfig

    live_provider = ServingConfig.load(os.environ).live_provider
    if live_provider == "cpu":
        return "not used", "live_provider is cpu: live models run on the CPU"
    from cache.model.runtime import Accelerator

    if (missing_reason := Accelerator(live_provider).missing_reason()) is not None:
        return ("to do", f"live models would run on the CPU: {missing_reason}, or set live_provider to cpu")
    return (
        "ok",
        f"{live_provider}; `fallback` of /v1/generations says whether the service could load its models there",
    )


def check_store(config: "NightConfig") -> CheckResult:
    """Check that Redis has the pointer of this artefact store, and that it can create files exclusively."""
    from cache.control.store_problems import namespace_problems, unwritable_store_problem
    from cache.process.redis_server import running_server

    running_redis = running_server(config.path(config.state))
    server_url = config.redis_url or (running_redis.url if running_redis else None)
    store = config.store()
    if problems := namespace_problems(config, server_url, REDIS_TIMEOUT_S, is_own=not config.redis_url):
        return "to do", "; ".join(problems)
    if not missing_extra("the check of a night", "precompute", *PRECOMPUTE_MODULES):  # the service only reads
        from precompute.planning.next_night import night_problems

        if (problem := unwritable_store_problem(store)) is not None:
            return "to do", problem
        store.demand_write_once()
        if problems := night_problems(config, server_url):
            return "to do", "; ".join(problems)
    generation_count = len(store.names("generations"))
    return (
        "ok",
        (
            f"{config.artifacts}: {generation_count} generation{'s' * (generation_count != 1)} in namespace "
            f"{config.namespace}"
        ),
    )


def check_airflow(_config: "NightConfig") -> CheckResult:
    """Check the DAG files of an Airflow installation."""
    if missing_extra("a night", "airflow", "airflow"):
        return ("not used", "Airflow is not installed here: cron, for instance, can run `larder night`")
    installed_version = airflow_version()
    refusal_text = None if installed_version is None else airflow_refusal(installed_version)
    try:
        airflow_dags_folder = dags_folder(None)
    except LarderError as error:
        if names_dags_folder():
            return "to do", refusal_text or error.message
        return (
            "not used",
            refusal_text or "no AIRFLOW_HOME: `larder dags install FOLDER` adds the nights to an Airflow",
        )
    if refusal_text is not None:
        return "to do", refusal_text
    state_by_target = {file.target_path: file.state() for file in list_dag_files(airflow_dags_folder)}
    for target, state in state_by_target.items():
        if state in ("older", "changed", "foreign", "missing"):
            # The command replaces no file that it did not write as it is.
            force_option = " --force" if state in ("changed", "foreign") else ""
            return "to do", f"{target}: {_DAG_FILE_STATE_TEXTS[state]}; `larder dags install{force_option}`"
    has_pool = has_scoring_pool(os.environ)
    if has_pool is False:
        return "to do", f"Airflow has no pool {SCORING_POOL}, so scoring tasks wait for ever: `{POOL_COMMAND}`"
    pool_text = f"with the pool {SCORING_POOL}"
    if has_pool is None:
        pool_text = f"whose database was not asked for the pool {SCORING_POOL}: `airflow pools list` shows it"
    return (
        "ok",
        (
            f"{len(state_by_target)} DAGs in {Path(airflow_dags_folder)}, Airflow "
            f"{installed_version or 'of unknown version'}, {pool_text}"
        ),
    )


def check_lineage(_config: "NightConfig") -> CheckResult:
    """Check the settings of OpenLineage."""
    if not any(os.environ.get(name) for name in LINEAGE_TRANSPORTS):
        return "not used", f"no transport for OpenLineage's events, such as {LINEAGE_TRANSPORTS[0]}"
    try:
        version(_LINEAGE_PROVIDER)  # find_spec of its module would import Airflow
    except PackageNotFoundError:
        return (
            "to do",
            f"lineage needs {_LINEAGE_PROVIDER}, which is not installed here: {install_command('lineage')}",
        )
    if _LINEAGE_EXTRACTOR not in map(str.strip, os.environ.get(_LINEAGE_EXTRACTORS, "").split(";")):
        return ("to do", f"lineage events would name no data sets: set {_LINEAGE_EXTRACTORS}={_LINEAGE_EXTRACTOR}")
    return ("ok", "each task of a night sends OpenLineage events, if Airflow runs with this environment")


CHECK_BY_SUBJECT: dict[str, Callable[["NightConfig"], CheckResult]] = {
    "sources": check_sources,
    "bundle": check_bundle,
    "device": check_device,
    "redis": check_redis,
    "events": check_events,
    "live": check_live_provider,
    "store": check_store,
    "airflow": check_airflow,
    "lineage": check_lineage,
}


class RedisKind(NamedTuple):
    """Product and version of a server, the requirements that it misses, and the optional commands that it lacks."""

    product_name: str
    product_version: str
    missing_requirements: tuple[str, ...]
    absent_optional_commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.product_name} {self.product_version}".strip()


def inspect_redis(server: "redis.Redis") -> RedisKind:
    """Inspect one server with INFO, a script and COMMAND INFO.

    Commands that the user may not run count as supported. Raises redis.ResponseError if the server currently refuses
    to run scripts.
    """
    from redis.exceptions import NoPermissionError, ResponseError

    from cache.l2.resp import WrongReply, refuse_reply

    server_info: dict[str, Any] = server.info("server")
    product_name, product_version = _product_and_version(server_info)
    missing_requirements = []
    try:
        server.eval(FLAGGED_SCRIPT, 0)
    except NoPermissionError:
        pass
    except ResponseError as error:
        # Other errors (a read-only replica, a full disk) do not depend on the version: the caller reports them.
        if type(error) is not ResponseError or not _SCRIPT_REFUSED_PATTERN.search(str(error)):
            raise
        missing_requirements.append("scripts with flags (Redis 7.0, Valkey and newer have them)")
    command_names = (*NEEDED_COMMANDS, *LACK_EFFECT_BY_COMMAND)
    try:
        command_infos: Any = server.execute_command("COMMAND INFO", *command_names)  # type: ignore[no-untyped-call]
        if len(command_infos) != len(command_names):
            refuse_reply("COMMAND INFO", command_infos, "one entry for each requested command")
    except WrongReply:
        raise
    except ResponseError:
        command_infos = command_names
    known_commands = {
        product_name for product_name, command_info in zip(command_names, command_infos, strict=True) if command_info
    }
    missing_requirements += [command.upper() for command in NEEDED_COMMANDS if command not in known_commands]
    # WAITAOF is needed only without CONFIG, which otherwise tells how durable events are.
    dispensable_names = (
        ()
        if "config" in known_commands
        else [command for command in LACK_EFFECT_BY_COMMAND if command not in known_commands]
    )
    dispensable_missing = [f"{command.upper()} ({LACK_EFFECT_BY_COMMAND[command]})" for command in dispensable_names]
    return RedisKind(product_name, product_version, tuple(missing_requirements), tuple(dispensable_missing))


def _product_and_version(server_info: dict[str, Any]) -> tuple[str, str]:
    if "dragonfly_version" in server_info:
        return "Dragonfly", str(server_info["dragonfly_version"]).removeprefix("df-").removeprefix("v")
    if server_info.get("server_name") == "valkey":
        return "Valkey", str(server_info.get("valkey_version", ""))
    # In INFO, only the path of its executable distinguishes KeyDB from Redis.
    is_keydb = "keydb" in str(server_info.get("executable", ""))
    return "KeyDB" if is_keydb else "Redis", str(server_info.get("redis_version", ""))
