"""Every command that Larder sends has a shape of its reply; replies of another are refused by the command's name."""

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.commands.core import CoreCommands

from cache.l2.resp import (
    MEMBERS_SHAPE,
    REPLY_SHAPES,
    WrongReply,
    check_replies,
    checked_reply,
    info_number,
    reply_excerpt,
)
from cache.l2.sync_clients import clone_client, open_client
from infra.cli.check import LACK_EFFECT_BY_COMMAND, NEEDED_COMMANDS
from tests.forged.proxy import Order, forging
from tests.forged_redis import forged_redis

ROOT = Path(__file__).parents[4]

HANDSHAKE = {"hello", "auth", "client|setname"}
"""Sent by redis-py as it connects, which looks at the replies itself; that to HELLO is checked by the parser."""
READ_PATH = {"asking"}
"""Sent by the read path alone, over connections of its own."""
SUBSCRIBED = {"subscribe", "unsubscribe"}
"""Answered by messages, which `ControlPlane.subscribe` checks."""
IN_SCRIPTS = {"xgroup|delconsumer", "xinfo|consumers"}
"""Sent by scripts alone."""
BY_HAND = {"latency|latest", "slowlog|get", "script|load"}
"""Allowed for whoever looks why Redis is slow, or tries a script."""
FAMILIES = {
    "xgroup": "xgroup|create",
    "xinfo": "xinfo|stream",
    "memory": "memory|usage",
    "config": "config|get",
    "script": "script|load",
}
"""The command of each family that is sent."""

ENTRY = [b"17-0", [b"e", b"{}"]]
SLOTS = [[0, 16_383, [b"127.0.0.1", 7000, b"id", []]]]

RIGHT: dict[str, tuple[list[Any], list[Any]]] = {
    "CLUSTER SLOTS": ([SLOTS, []], [SLOTS]),
    "COMMAND": ([[[b"get", 2, [b"readonly"], 1, 1, 1, [b"@read"]]]], []),
    "COMMAND INFO": ([[[b"get", 2, [b"readonly"], 1, 1, 1], None]], []),
    "CONFIG GET": ([[b"a", b"b"], []], [{b"a": b"b"}, {}]),
    "EVAL": ([1, b"a", None, [1, b"a"]], []),
    "BGREWRITEAOF": ([b"Background append only file rewriting started"], []),
    "EVALSHA": ([[b"17-0"]], []),
    "FLUSHALL": ([b"OK"], []),
    "GET": ([b"\xff", None], []),
    "GETRANGE": ([b"", b"\xff"], []),
    "HELLO": ([{b"proto": 3}], [{b"proto": 3}]),
    "HGET": ([b"a", None], []),
    "HGETALL": ([[b"a", b"b"], []], [{b"a": b"b"}, {}]),
    "INFO": ([b"# Server\r\nrun_id:ab\r\n", b"# Keyspace\r\n"], []),
    "INCR": ([-1], []),
    "MEMORY USAGE": ([7, None], []),
    "MGET": ([[b"a", None]], []),
    "PING": ([b"PONG"], []),
    "PTTL": ([-2], []),
    "SENTINEL MASTERS": (
        [[[b"name", b"main", b"ip", b"127.0.0.1", b"port", b"7000", b"flags", b"master"]]],
        [[{b"name": b"main", b"ip": b"127.0.0.1", b"port": b"7000", b"flags": b"master"}]],
    ),
    "SET": ([b"OK", None], []),
    "TIME": ([[b"17", b"5"], [17, 5]], []),
    "WAITAOF": ([[1, 0]], []),
    "XADD": ([b"17-0", None], []),
    "XAUTOCLAIM": ([[b"0-0", [ENTRY], []], [b"0-0", [None]]], []),
    "XGROUP CREATE": ([b"OK"], []),
    "XINFO STREAM": (
        [[b"length", 1, b"last-generated-id", b"17-0", b"first-entry", ENTRY, b"last-entry", ENTRY]],
        [{b"length": 1, b"last-generated-id": b"17-0", b"first-entry": ENTRY, b"last-entry": ENTRY}],
    ),
    "XRANGE": ([[ENTRY], []], []),
    "XREAD": ([[[b"s", [ENTRY]]], None], [{b"s": [ENTRY]}, None]),
    "XREADGROUP": ([[[b"s", [ENTRY, [b"17-1", None]]]], None], [{b"s": [ENTRY]}]),
    "XREVRANGE": ([[ENTRY]], []),
    "ZINCRBY": ([b"2.5"], [2.5]),
    "ZRANGEBYSCORE": ([[b"a"], []], []),
    "ZREVRANGE": ([[b"a"], []], []),
    "_": ([b"OK", b"QUEUED", [1, 2], None], []),
}
"""Replies of a real Redis by RESP2, and by RESP3 where they differ; all other commands are answered by a count."""

STRANGE: dict[str, Any] = {
    "negative": -1, "double": 1.5, "nan": float("nan"), "true": True, "text": b"forged", "empty": b"", "nothing": None,
    "no elements": [], "no pairs": {}, "map": {b"a": b"b"}, "nested map": {1: [2]}, "one": [b"a"],
    "nulls": [None, None, None], "nested": [[[1]]], "error": [redis.ResponseError("forged")], "pairs": [[b"17-0"]],
    "no UTF-8": [b"\xff", b"\xfe"],
}  # fmt: skip
LISTS = {"no elements", "one", "nulls", "nested", "error", "pairs", "no UTF-8"}

ACCEPTED_REPLIES: dict[str, set[str]] = {
    "a slot map": {"no elements"},
    "a list of commands": {"no elements", "nulls", "nested", "pairs"},
    "a map of texts": {"no elements", "no UTF-8"},
    "a text or nothing": {"text", "empty", "nothing"},
    "a text": {"text", "empty"},
    "a map": {"no pairs", "map", "nested map"},
    "an integer": {"negative"},
    "a count or nothing": {"nothing"},
    "a list of texts or nothings": {"no elements", "one", "nulls", "no UTF-8"},
    "a list of maps": {"no elements"},
    "OK or nothing": {"nothing"},
    "a position or nothing": {"nothing"},
    "entries of a stream": {"no elements"},
    "the fields of a stream": {"no elements", "no UTF-8"},
    "streams with entries": {"nothing", "no elements"},
    "a score": {"negative", "double", "nan"},
    "members of a sorted set": {"no elements", "one", "no UTF-8"},
    "a count, a text, a list or nothing": LISTS | {"negative", "text", "empty", "nothing"},
    "OK, QUEUED or a list": LISTS | {"text", "empty", "nothing"},
}
"""Strange replies that are of a shape all the same; of a shape that is not named here none is."""
PASSING_RESP3 = {
    "a map of texts": {"no pairs", "map"}, "streams with entries": {"nothing", "no pairs"},
    "the fields of a stream": {"no pairs", "map", "nested map"},
}  # fmt: skip


def right_replies(command: str, protocol: int) -> list[Any]:
    """Right replies to a command by a protocol."""
    by_resp2, by_resp3 = RIGHT.get(command, ([0, 7], []))
    return by_resp3 or by_resp2 if protocol == 3 else by_resp2


def client_of(protocol: int, *, is_async: bool = False) -> Any:
    """A client that checks replies, and opens no connection."""
    kind: Any = redis.asyncio.Redis if is_async else redis.Redis
    return check_replies(kind(protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("command", REPLY_SHAPES)
def test_a_right_reply_passes(command: str, protocol: int, is_async: bool) -> None:
    callbacks = client_of(protocol, is_async=is_async).response_callbacks
    for reply in right_replies(command, protocol):
        callbacks[command](deepcopy(reply))  # redis-py changes some in place


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("command", REPLY_SHAPES)
def test_every_other_reply_is_refused_by_the_name_of_its_command(command: str, protocol: int) -> None:
    callback, description = (client_of(protocol).response_callbacks[command], REPLY_SHAPES[command].shape_in_words)
    accepted_names = ACCEPTED_REPLIES.get(description, set())
    if protocol == 3:
        accepted_names = PASSING_RESP3.get(description, accepted_names)
    for name, reply in STRANGE.items():
        if name not in accepted_names:
            with pytest.raises(redis.InvalidResponse) as raised:
                callback(reply)
            named = "EXEC" if command == "_" else command
            assert str(raised.value) == f"{named} was answered by {reply_excerpt(reply)}, not by {description}"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("command", REPLY_SHAPES)
def test_no_reply_ends_as_an_error_of_python(command: str, protocol: int) -> None:
    callback = client_of(protocol).response_callbacks[command]
    for options in [{}, {"withscores": True}] if REPLY_SHAPES[command] is MEMBERS_SHAPE else [{}]:
        for reply in STRANGE.values():
            with suppress(redis.InvalidResponse):
                callback(deepcopy(reply), **options)


def test_members_come_with_scores_where_they_are_asked_for() -> None:
    by_resp2 = client_of(2).response_callbacks["ZRANGEBYSCORE"]
    by_resp3 = client_of(3).response_callbacks["ZRANGEBYSCORE"]

    assert by_resp2([b"a", b"1.5"], withscores=True) == [(b"a", 1.5)]
    assert by_resp3([[b"a", 1.5]], withscores=True) == [[b"a", 1.5]]
    for callback, reply in ((by_resp2, [b"a"]), (by_resp2, [b"a", b"b"]), (by_resp3, [b"ab"])):
        with pytest.raises(WrongReply, match="not by members with their scores"):
            callback(reply, withscores=True)


def test_a_masters_row_without_its_flags_is_refused() -> None:
    callback = client_of(2).response_callbacks["SENTINEL MASTERS"]
    with pytest.raises(WrongReply, match="SENTINEL MASTERS was answered by"):
        callback([[b"name", b"main"]])


def test_what_is_shown_is_short_and_one_line() -> None:
    with pytest.raises(WrongReply) as raised:
        checked_reply("TIME", b"\r\n\x00\xff" * 1_000)
    assert str(raised.value).startswith(r"TIME was answered by b'\r\n\x00\xff")
    assert len(str(raised.value)) < 140
    for reply in (b"x" * 10_000, [b"x" * 10_000] * 1_000, {b"a" * 99: [b"b"] * 99}, "\x1b[31m", 10**70):
        assert len(reply_excerpt(reply)) <= 83
        assert reply_excerpt(reply).isprintable()
    assert reply_excerpt(1.5) == "1.5"
    assert reply_excerpt(None) == "nothing"


def test_a_number_of_info_is_a_number() -> None:
    assert info_number({"maxmemory": 7}, "maxmemory") == 7
    assert info_number({}, "maxmemory", 0) == 0
    for info in ({}, {"maxmemory": "7b"}, {"maxmemory": 1.5}, {"maxmemory": {"a": 1}}):
        with pytest.raises(WrongReply, match=r"INFO was answered by .*, not by a number as maxmemory"):
            info_number(info, "maxmemory")


@contextmanager
def answered_by(reply: bytes) -> Iterator[Any]:
    with forged_redis(reply) as port:
        client = redis.Redis(port=port, protocol=2, socket_timeout=5.0)
        with check_replies(client) as checking:
            yield checking


@pytest.mark.parametrize(
    ("reply", "send_command", "expected_message"),
    [
        (b",1.5\r\n", lambda client: client.time(), "TIME was answered by 1.5, not by two numbers"),
        (b"$0\r\n\r\n", lambda client: client.strlen("a"), "STRLEN was answered by b'', not by a count"),
        (b"_\r\n", lambda client: client.info(), "INFO was answered by nothing, not by sections of name:value"),
        (b"*0\r\n", lambda client: client.info(), "INFO was answered by [], not by sections of name:value"),
        (b"#t\r\n", lambda client: client.mget("a"), "MGET was answered by True, not by a list of texts or nothings"),
        (b"*1\r\n*0\r\n", lambda client: client.hgetall("a"), "HGETALL was answered by [[]], not by a map of texts"),
    ],
)  # fmt: skip
def test_a_client_says_what_its_command_was_answered_by(
    reply: bytes, send_command: Callable[[Any], Any], expected_message: str
) -> None:
    with answered_by(reply) as client, pytest.raises(redis.InvalidResponse) as raised:
        send_command(client)
    assert str(raised.value) == expected_message


def test_a_pipeline_reads_what_stands_behind_a_wrong_reply() -> None:
    with answered_by(b":-7\r\n:8\r\n:9\r\n") as client:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.strlen("a").strlen("b").strlen("c")
            first, *remaining_replies = pipeline.execute(raise_on_error=False)
        assert isinstance(first, WrongReply)
        assert remaining_replies == [8, 9]

        with client.pipeline(transaction=False) as pipeline:
            pipeline.strlen("a").strlen("b").strlen("c")
            with pytest.raises(redis.InvalidResponse, match="STRLEN was answered by -7"):
                pipeline.execute()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("is_another", [False, True], ids=["client", "another"])
def test_a_reply_that_is_left_over_is_not_taken_for_the_next_one(
    redis_url: str, protocol: int, is_another: bool
) -> None:
    with forging(redis_url) as proxy:
        settings: Any = {"protocol": protocol, "socket_timeout": 5.0}
        client = open_client(f"redis://127.0.0.1:{proxy.port}/0", **settings)
        asking: Any = clone_client(client, socket_timeout=4.0) if is_another else client
        asking.set("shapes:first", "1")
        asking.set("shapes:second", "2")
        proxy.forge(Order("GET", "the reply twice"))
        assert asking.get("shapes:first") == b"1"
        proxy.forge(None)

        assert asking.get("shapes:second") == b"2"
        asking.delete("shapes:first", "shapes:second")
        asking.close()
        client.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_replies_of_a_real_redis_pass(redis_url: str, protocol: int) -> None:
    """Of a command that needs another kind of server, the error does."""
    client: Any = check_replies(redis.Redis.from_url(redis_url, protocol=protocol))
    key, stream, scores = "shapes:key", "shapes:stream", "shapes:scores"
    client.delete(key, stream, scores, "shapes:hash", "shapes:sketch", "shapes:count")

    assert client.ping() is True
    assert client.set(key, b"0123") is True
    assert client.set(key, b"0", nx=True) is None
    assert client.setrange(key, 2, b"45") == 4
    assert client.getrange(key, 0, 1) == b"01"
    assert client.strlen(key) == 4
    assert client.get("shapes:absent") is None
    assert client.mget(key, "shapes:absent") == [b"0145", None]
    assert client.exists(key) == 1
    assert client.expire(key, 60) is True
    assert client.pexpire(key, 60_000) is True
    assert client.pttl(key) > 0
    assert client.memory_usage(key) > 0
    assert client.memory_usage("shapes:absent") is None
    assert client.hset("shapes:hash", "a", "b") == 1
    assert client.hget("shapes:hash", "a") == b"b"
    assert client.hgetall("shapes:hash") == {b"a": b"b"}
    assert client.hgetall("shapes:absent") == {}
    assert client.hlen("shapes:hash") == 1
    assert client.hdel("shapes:hash", "a") == 1
    assert client.incr("shapes:count") == 1
    assert client.pfadd("shapes:sketch", "a") == 1
    assert client.pfcount("shapes:sketch") == 1
    assert client.zadd(scores, {"a": 1.5, "b": 2}) == 2
    assert client.zincrby(scores, 1, "a") == 2.5
    assert client.zrangebyscore(scores, "-inf", "+inf") == [b"b", b"a"]
    assert [list(scored_member) for scored_member in client.zrevrange(scores, 0, -1, withscores=True)] == [
        [b"a", 2.5],
        [b"b", 2.0],
    ]
    assert client.zrem(scores, "a") == 1
    assert client.zremrangebyrank(scores, 5, 6) == 0
    assert client.zremrangebyscore(scores, 0, 9) == 1
    entry = client.xadd(stream, {"e": "{}"})
    assert client.xlen(stream) == 1
    assert client.xrange(stream) == client.xrevrange(stream) == [(entry, {b"e": b"{}"})]
    assert client.xread({stream: "0"})
    assert not client.xread({stream: entry})
    assert client.xgroup_create(stream, "group", "0") is True
    assert client.xreadgroup("group", "one", {stream: ">"})
    assert client.xautoclaim(stream, "group", "two", 0)[1]
    assert client.xack(stream, "group", entry) == 1
    assert client.xdel(stream, entry) == 1
    assert client.xtrim(stream, maxlen=0) == 0
    assert client.publish("shapes:channel", "a") == 0
    assert client.eval("return {1, 'a'}", 0) == [1, b"a"]
    assert client.execute_command("COMMAND INFO", "get", "absent")[1] is None
    assert client.config_get("maxmemory-policy")["maxmemory-policy"]
    assert client.info("server")["run_id"]
    assert all(type(number) is int for number in client.time())
    assert client.wait(0, 1) == 0
    with client.pipeline(transaction=True) as pipeline:
        pipeline.hset("shapes:hash", "a", "b").hdel("shapes:hash", "a")
        assert pipeline.execute() == [1, 1]
    assert client.unlink(key, stream, scores, "shapes:sketch") >= 2
    assert client.delete("shapes:count") == 1
    client.close()


def allowed_by(file: str) -> set[str]:
    """Commands that a file of users of Redis allows to the service, to producers and to nights."""
    return {
        command
        for line in (ROOT / file).read_text().splitlines()
        if line.startswith("user larder-")
        for command in re.findall(r"\+([a-z|]+)", line)
    }


def test_every_command_that_is_allowed_or_needed_has_a_shape() -> None:
    allowed = allowed_by("infra/redis.conf") | allowed_by("infra/redis-events.conf")
    needed = {FAMILIES.get(command, command) for command in (*NEEDED_COMMANDS, *LACK_EFFECT_BY_COMMAND)}
    exempt = HANDSHAKE | READ_PATH | SUBSCRIBED | IN_SCRIPTS | BY_HAND | {"multi", "exec"}
    sent_commands = {command.replace("|", " ").upper() for command in (allowed | needed) - exempt}
    assert len(sent_commands) > 45
    assert sent_commands - REPLY_SHAPES.keys() == set()


def test_every_command_that_the_code_names_has_a_shape() -> None:
    """Methods of redis-py's clients, and words that are handed to `ask`, `ask_all` and `execute_command`."""
    named = {
        command: f"{file.relative_to(ROOT)}:{line}"
        for folder in ("cache", "serving", "precompute", "infra", "dags")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, command in commands_in(ast.parse(file.read_text()))
    }
    assert len(named) > 30
    unshaped = {where: name for name, where in named.items() if name not in REPLY_SHAPES}
    assert unshaped == {}


METHODS = {
    "config_get": "CONFIG GET", "delete": "DEL", "memory_usage": "MEMORY USAGE", "xinfo_stream": "XINFO STREAM",
}  # fmt: skip
"""Commands of the methods that are not called as their commands are."""
CORE = frozenset(name for name in dir(CoreCommands) if not name.startswith("_")) - {"execute_command", "subscribe"}
CLIENTS = re.compile(r"(client|server|pipeline|replica|redis|home\(.*\))$")
"""Names that clients of redis-py go by."""
FIRST_WORDS = frozenset(
    name.upper().partition("_")[0] for name in CORE if name not in ("type", "role", "object", "keys")
)


def commands_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each command that a module sends; methods as well as words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CORE:
            if CLIENTS.search(ast.unparse(node.value)):
                yield node.lineno, METHODS.get(node.attr, node.attr.upper())
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SENDERS:
            yield from _constant(node.args[0] if node.args else node)
        elif isinstance(node, ast.Tuple) and node.elts:  # one of those that `ask_all` takes
            yield from (
                sent_command for sent_command in _constant(node.elts[0]) if sent_command[1].split()[0] in FIRST_WORDS
            )


SENDERS = ("ask", "ask_servers", "execute_command")


def _constant(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper():
        yield node.lineno, node.value
