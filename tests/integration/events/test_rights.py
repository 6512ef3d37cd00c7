"""Rights that events need, on servers as compose.yaml starts them: the service's, a producer's, the night's."""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.redis_keys import Keyspace
from cache.process.child_process import GuardedCommand
from cache.store.artefacts import ArtefactStore
from cache.store.erasures import request_erasure
from precompute.config.settings import NightConfig
from precompute.events.stores import connect_events
from precompute.events.stream import (
    EventStores,
    forget_events,
    forget_in_stream,
    start_log_rewrite,
    take_events,
    trim_stream,
)
from precompute.sources.erasures import ErasedEntities
from serving.events import intake as inbox_module
from serving.events.intake import INBOX_GROUP
from tests.conftest import redis_binary
from tests.integration.events.durable_redis import durable_redis
from tests.integration.events.intakes import event, intake
from tests.integration.events.test_check import check_events
from tests.integration.releases.test_acl import CONF, answering, client
from tests.integration.serving_app import eventually
from tests.polling import poll_until
from tests.unit.infra.test_alerts import SECTIONS

KEYS = Keyspace("default")
SERVICES: Any = yaml.safe_load((CONF.parent / "compose.yaml").read_text())["services"]
SHARED, EVENTS_SERVER = "redis", "redis-events"
DURABILITY = {SHARED: "none", EVENTS_SERVER: "everysec"}
"""Durability of events in the server of pages, and in their own."""
PASSWORDS = {"larder-reader": "reads", "larder-loader": "loads"}


def started(name: str, folder: Path, socket: Path) -> GuardedCommand:
    """The server of a service of compose.yaml, by its own command: on a socket, with files in `folder`."""
    service = SERVICES[name]
    conf = CONF.parent / service["volumes"][0].split(":")[0]
    (shell, flags, script) = service["command"]
    for of_container, replacement in (
        ("$$", "$"), ("/etc/larder/redis.conf", str(conf)), ("/tmp/redis.conf", str(folder / "redis.conf")),
        ("redis-server", str(redis_binary())),
    ):  # fmt: skip
        assert of_container in script
        script = script.replace(of_container, replacement)
    options = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", service["environment"]["REDIS_OPTIONS"])
    environ = {
        "LARDER_READER_PASSWORD": "reads", "LARDER_LOADER_PASSWORD": "loads", "LARDER_PRODUCER_PASSWORD": "produces",
        "REDIS_OPTIONS": f"{options} --port 0 --unixsocket {socket} --dir {folder}",
    }  # fmt: skip
    return GuardedCommand([shell, flags, script], log_path=folder / "log", env={**os.environ, **environ})


@pytest.fixture(scope="module", params=[SHARED, EVENTS_SERVER])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The name of a service, and the socket of its server."""
    folder = tmp_path_factory.mktemp("rights")
    path = folder / "redis.sock"
    with started(request.param, folder, path) as process:
        assert poll_until(lambda: answering(path)), process.log_tail()
        yield request.param, path


@pytest.fixture
def socket(server: tuple[str, Path]) -> Path:
    return server[1]


async def test_the_service_takes_events_in_with_the_readers_rights(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, socket = server
    for setting, value in (("CLAIM_EVERY_S", 0.05), ("CLAIM_AFTER_MS", 1), ("FORGET_CONSUMER_AFTER_MS", 0)):
        monkeypatch.setattr(inbox_module, setting, value)
    url = f"unix://larder-reader:reads@{socket}"
    with client(socket, "larder-producer", "produces") as producer:
        producer.xadd(KEYS.inbox, {"user": "u", "item": "i", "id": "1"})
        producer.xadd(KEYS.inbox, {"user": "u"})
    async with intake(url, KEYS, inbox=True) as running_intake:
        answer = await running_intake.accept_events(event(1), event(1), {"id": "x"})
        await running_intake.parts.intake.rejections.flush()
        assert (answer["accepted"], answer["repeated"]) == (1, 1)
        assert answer["durability"] == DURABILITY[name]

        counts = running_intake.parts.intake.counts

        async def is_inbox_empty() -> bool:
            await counts.refresh()
            return counts.value_by_gauge["inbox_length"] == 0

        assert await eventually(is_inbox_empty)
        assert (counts.value_by_gauge["up"], counts.value_by_gauge["stream_length"]) == (1, 2)
        assert (running_intake.results["accepted"], running_intake.results["missing_field"]) == (2, 2)
    with client(socket, "larder-reader", "reads") as reader:
        assert reader.xread({KEYS.events: "0"})  # as the follower does
        assert reader.time()


async def test_accepted_events_outlive_a_restart_of_their_server(tmp_path: Path) -> None:
    # Given a server of events that has accepted two
    path = tmp_path / "redis.sock"
    url = f"unix://larder-reader:reads@{path}"
    with started(EVENTS_SERVER, tmp_path, path) as process:
        assert poll_until(lambda: answering(path)), process.log_tail()
        async with intake(url, KEYS) as running_intake:
            answer = await running_intake.accept_events(event(1), event(2))
            assert answer["accepted"] == 2

    # When it starts again over the same folder
    with started(EVENTS_SERVER, tmp_path, path) as process:
        assert poll_until(lambda: answering(path)), process.log_tail()
        with client(path, "larder-reader", "reads") as reader:
            stream_length = reader.xlen(KEYS.events)
        async with intake(url, KEYS) as running_intake:
            answer = await running_intake.accept_events(event(1), event(2), event(3))

    # Then the stream and the ids are still there
    assert stream_length == 2
    assert (answer["accepted"], answer["repeated"]) == (1, 2)


def test_the_night_takes_over_trims_and_forgets_with_the_loaders_rights(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    name, socket = server
    url = f"unix://larder-loader:loads@{socket}"
    config = NightConfig(events_url=url, events=EventsConfig(enabled=True), base=str(tmp_path))
    store = ArtefactStore(str(tmp_path / "store"))
    with client(socket, "larder-reader", "reads") as reader:
        for user in ("stays", "goes"):
            body = Event("1", 1, user.encode(), b"i").to_bytes()
            reader.xadd(KEYS.events, {"e": body})
            reader.xadd(KEYS.rejected_events, {"reason": "in_future", "event": body})
        event_count = reader.xlen(KEYS.events)

        with connect_events(config) as loader:
            forgotten_count = forget_in_stream(loader, KEYS, ErasedEntities(frozenset([b"goes"]), frozenset()))
            taken_events = take_events(store, loader, KEYS)
            trimmed = trim_stream(EventStores(store, KEYS.namespace), loader, KEYS, keep_s=0.0, stream_bytes=1)

        assert forgotten_count >= 2 and taken_events.event_count == trimmed == event_count - 1
        assert reader.xlen(KEYS.events) == 0
    state, _ = check_events(tmp_path, url, enabled=True)  # `larder check`
    assert state == ("ok" if name == EVENTS_SERVER else "to do")


def test_check_says_what_a_users_rights_do_not_suffice_for(socket: Path, tmp_path: Path) -> None:
    text_by_user = {
        user: check_events(tmp_path, f"unix://{user}:{password}@{socket}", enabled=True, durability="any")
        for user, password in (("larder-reader", "reads"), ("larder-loader", "loads"), ("larder-producer", "produces"))
    }

    if (reader_text := text_by_user["larder-reader"])[0] == "ok":  # not where pages share the server, which may evict
        assert reader_text[1].endswith("(XREVRANGE, XDEL, XTRIM refused): nights need another user")
        assert "services need another user" in text_by_user["larder-loader"][1]
    assert text_by_user["larder-producer"][0] == "to do"


def log_bytes(folder: Path) -> bytes:
    """All that the append-only file of a server holds."""
    while True:
        try:
            return b"".join(path.read_bytes() for path in sorted((folder / "appendonlydir").iterdir()))
        except FileNotFoundError:  # Redis renamed a file behind the listing
            continue


def test_an_erasure_leaves_nothing_in_the_servers_log(tmp_path: Path) -> None:
    # Given a server with the shipped configuration, and an event of an erased user between others of the same block
    path = tmp_path / "redis.sock"
    url = f"unix://larder-loader:loads@{path}"
    config = NightConfig(
        namespace="default", events_url=url, events=EventsConfig(enabled=True), artifacts=str(tmp_path / "store"),
        base=str(tmp_path),
    )  # fmt: skip
    with started(EVENTS_SERVER, tmp_path, path) as process:
        assert poll_until(lambda: answering(path)), process.log_tail()
        with client(path, "larder-reader", "reads") as reader:
            for number, user in enumerate(["stays-1", "goes-away", "stays-2"]):
                reader.xadd(KEYS.events, {"e": Event(str(number), 1, user.encode(), b"i").to_bytes()})
            assert poll_until(lambda: b"goes-away" in log_bytes(tmp_path))

            # When the user is erased
            forget_events(config, [request_erasure(config.store(), b"goes-away", "user", requested_at=0.0)])

            # Then the log is rewritten without the event
            assert poll_until(lambda: b"goes-away" not in log_bytes(tmp_path)), reader.info("persistence")
            assert b"stays-1" in log_bytes(tmp_path) and reader.xlen(KEYS.events) == 2

            # And a night with the pending erasure rewrites it once more; other commands do not
            rewrites = reader.info("persistence")["aof_rewrites"]
            forget_events(config, [request_erasure(config.store(), b"goes-away", "user", requested_at=0.0)])
            assert reader.info("persistence")["aof_rewrites"] == rewrites
            forget_events(
                config, [request_erasure(config.store(), b"goes-away", "user", requested_at=0.0)], in_night=True
            )
            assert poll_until(lambda: reader.info("persistence")["aof_rewrites"] == rewrites + 1)


def test_a_log_that_is_not_rewritten_is_warned_of_and_stops_no_erasure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with durable_redis(tmp_path) as server, server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "old", "on", ">old", "~*", "+@all", "-bgrewriteaof")
        config = NightConfig(
            namespace="default", events_url=server.url.replace("//", "//old:old@"), events=EventsConfig(enabled=True),
            artifacts=str(tmp_path / "store"), base=str(tmp_path),
        )  # fmt: skip
        erasure = request_erasure(config.store(), b"goes", "user", requested_at=0.0)

        # The user lacks the right
        forget_events(config, [erasure], in_night=True)
        assert "until it is rewritten, which Redis did not begin" in caplog.text and "+bgrewriteaof" in caplog.text

        # The log begins with a snapshot, as by default
        caplog.clear()
        with redis.Redis(port=server.port, protocol=3) as connection:
            assert start_log_rewrite(connection)
        assert "set aof-use-rdb-preamble no" in caplog.text

        # There is no log
        caplog.clear()
        admin.config_set("appendonly", "no")
        with redis.Redis(port=server.port) as connection:
            assert not start_log_rewrite(connection)
        assert not caplog.text


def test_with_a_server_of_their_own_no_user_reaches_anything_else(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    commands = [
        ("SET", KEYS.overlay("g1", "user_topk", "ab"), "x"), ("GET", KEYS.live), ("SET", KEYS.live, "{}"),
        ("HSET", KEYS.generations, "g1", "{}"), ("ZADD", KEYS.replicas, "1", "a"), ("FLUSHALL",),
        ("CONFIG", "SET", "appendonly", "no"), ("ACL", "LIST"), ("SHUTDOWN",), ("UNLINK", KEYS.events),
    ]  # fmt: skip
    with started(EVENTS_SERVER, tmp_path, socket) as process:
        assert poll_until(lambda: answering(socket)), process.log_tail()
        for user, password in (("larder-reader", "reads"), ("larder-loader", "loads")):
            with client(socket, user, password) as connection:
                for command in commands:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        connection.execute_command(*command)
        with client(socket, "default", "") as anonymous, pytest.raises(redis.exceptions.RedisError):
            anonymous.ping()


def test_a_server_of_their_own_gives_no_right_that_the_shared_one_does_not() -> None:
    """Brackets of the service are the same in both, its producers' line too; the night may do no other command."""

    def users(file: str) -> Mapping[str, str]:
        lines = (CONF.parent / file).read_text().splitlines()
        return {line.split()[1]: line for line in lines if line.startswith("user larder-")}

    def brackets(line: str) -> set[str]:
        return set(re.findall(r"\([^)]*\)", line))

    def commands(line: str) -> set[str]:
        return set(re.findall(r"\+([\w|]+)", line))

    shared, own_lines = users("redis.conf"), users("redis-events.conf")

    assert own_lines.keys() == shared.keys()
    assert own_lines["larder-producer"] == shared["larder-producer"]
    reads, all_reads = brackets(own_lines["larder-reader"]), brackets(shared["larder-reader"])
    assert reads <= all_reads
    assert {bracket for bracket in all_reads if ":events" in bracket} <= reads
    # The Redis of pages has no log, and its users must not start a rewrite.
    assert commands(own_lines["larder-loader"]) - {"bgrewriteaof"} <= commands(shared["larder-loader"])


def read_runbook_commands() -> list[tuple[str, str, str]]:
    """(server, user, command) of each line of redis-cli in the runbook; "" where no user is named.

    What sections of events say holds for either server, by where events lie.
    """
    runbook_commands = []
    for name, text in SECTIONS.items():
        servers = (SHARED, EVENTS_SERVER) if name.startswith("LarderEvents") else (SHARED,)
        for line in re.split(r"(?m)^- ", text):
            user = ""  # who is named holds for the rest of a step
            for named, command in re.findall(r"as `(larder-\w+)`|`redis-cli ([^`]+)`", line):
                user = named or user
                if command:
                    runbook_commands += [(server, user, command) for server in servers]
    return sorted(set(runbook_commands))


@pytest.mark.parametrize(("server", "user", "command"), read_runbook_commands(), indirect=["server"], ids=str)
def test_what_the_runbook_says_to_run_the_user_that_it_names_may_run(
    server: tuple[str, Path], user: str, command: str
) -> None:
    _, socket = server
    with client(socket, "larder-producer", "produces") as producer:
        producer.xadd(KEYS.inbox, {"user": "u"})
    with client(socket, "larder-reader", "reads") as reader:
        reader.xadd(KEYS.rejected_events, {"reason": "in_future"})
        with contextlib.suppress(redis.exceptions.ResponseError):  # it is there
            reader.xgroup_create(KEYS.inbox, INBOX_GROUP, "0")
    streams = {"$INBOX": KEYS.inbox, "$REJECTED": KEYS.rejected_events}
    command_parts = [streams.get(part, part) for part in shlex.split(command)]

    with client(socket, user, PASSWORDS[user]) as connection:
        connection.execute_command(*command_parts)  # raises without the right


def test_the_runbook_tells_to_run_something_on_either_server() -> None:
    of_server = Counter(server for server, _, _ in read_runbook_commands())
    assert of_server[EVENTS_SERVER] >= 4 and of_server[SHARED] >= 4 + 6


@pytest.mark.parametrize(
    "command",
    [
        ("XADD", KEYS.events, "*", "e", "{}"),
        ("XADD", "larder:1:{other}:events:inbox", "*", "e", "{}"),
        ("XLEN", KEYS.inbox),
        ("XRANGE", KEYS.inbox, "-", "+"),
        ("XREADGROUP", "GROUP", INBOX_GROUP, "x", "STREAMS", KEYS.inbox, ">"),
        ("DEL", KEYS.inbox),
        ("GET", KEYS.live),
        ("EVAL", "return 1", "0"),
        ("CONFIG", "GET", "appendonly"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_producer_may_write_into_the_inbox_and_nothing_else(socket: Path, command: tuple[str, ...]) -> None:
    with client(socket, "larder-producer", "produces") as producer, pytest.raises(redis.exceptions.NoPermissionError):
        producer.execute_command(*command)


@pytest.mark.parametrize(
    "command",
    [
        ("XADD", "larder:1:{other}:events", "*", "e", "{}"),
        ("XTRIM", KEYS.events, "MAXLEN", "0"),
        ("XDEL", KEYS.events, "1-0"),
        ("SET", KEYS.events, "x"),
        ("XGROUP", "CREATE", KEYS.events, "g", "0"),
        ("EVAL", "return redis.call('SET', KEYS[1], 'x')", "1", KEYS.events),
        ("EVAL", "return redis.call('XDEL', KEYS[1], '1-0')", "1", KEYS.events),
        ("SET", KEYS.inbox, "x"),
        ("SET", KEYS.rejected_events, "x"),
        ("XRANGE", KEYS.rejected_events, "-", "+"),
        ("XADD", KEYS.inbox, "*", "user", "u"),
        ("DEL", KEYS.events),
        ("UNLINK", KEYS.inbox),
        ("INCR", KEYS.live),
        ("CONFIG", "SET", "appendonly", "no"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_service_can_neither_trim_remove_nor_overwrite_events(socket: Path, command: tuple[str, ...]) -> None:
    with (
        client(socket, "larder-reader", "reads") as reader,
        pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|can't access"),
    ):
        reader.execute_command(*command)
