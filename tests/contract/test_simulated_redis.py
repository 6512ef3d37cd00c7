"""The simulated Redis answers as a real one does: random commands of the service, the same bytes to both."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pytest
import redis

from cache.format.redis_keys import Keyspace
from cache.l2 import commands, control_plane
from cache.usage import hot_keys
from precompute.releases import staging
from tests.simulation.redis_server import Session, SimulatedRedis

START = 1_900_000_000.0
COMMANDS = 400


class Ends(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)


class Simulated:
    """A connection to a simulated server."""

    def __init__(self, keys: Keyspace) -> None:
        self.server = SimulatedRedis(keys, lambda: START)
        self._ends, self._session = Ends(), Session(self.server)
        self._session.connection_made(self._ends)

    def send_command(self, packed: bytes) -> bytes:
        self._ends.written = b""
        self._session.data_received(packed)
        return self._ends.written


@contextmanager
def real(url: str) -> Iterator[redis.Redis]:
    with redis.Redis(host=urlsplit(url).hostname or "", port=urlsplit(url).port or 0, protocol=2) as client:
        yield client


def packed(arguments: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(arguments) + b"".join(
        b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments
    )


def command(rng: random.Random, keys: Keyspace) -> list[bytes]:
    """A command as the service, or the night, sends it; lives are long, so that nothing ends meanwhile."""
    text = [f"{keys.overlay('g', 't', str(number))}".encode() for number in range(3)]
    members = [b"m%d" % number for number in range(4)]
    page, name, value = keys.page("g", "t", 0).encode(), rng.choice(text), rng.choice(members)
    replicas, sketch, note = keys.replicas.encode(), keys.hot_names(1).encode(), keys.staging_note.encode()
    channel, live = keys.channel.encode(), keys.live.encode()
    score = b"%d" % rng.randrange(5)

    def script(source: str | bytes, names: list[bytes], *argv: bytes) -> list[bytes]:
        raw = source if isinstance(source, bytes) else source.encode()
        return [b"EVAL", raw, b"%d" % len(names), *names, *argv]

    attempt, generation = rng.choice([b"a", b"b"]), rng.choice([b"g1", b"g2"])
    stage_ends_at = rng.choice([b"1", b"9999999999"])
    staged = b'{"generation":"%b","attempt":"%b","until":%b}' % (generation, attempt, stage_ends_at)
    return rng.choice([
        [b"GET", name], [b"MGET", name, text[0], page], [b"SET", page, b"0123456789"],
        [b"GETRANGE", page, b"2", b"5"], [b"GETRANGE", b"none", b"0", b"3"],
        [b"SET", name, value, b"PX", b"500000"], [b"SET", name, value, b"NX", b"GET", b"PX", b"500000"],
        [b"ZADD", replicas, score, value], [b"ZREM", replicas, value, members[0]],
        [b"ZREVRANGE", replicas, b"0", b"9", b"WITHSCORES"], [b"ZREVRANGE", sketch, b"0", b"1", b"WITHSCORES"],
        [b"HSET", b"hash", value, score], [b"HDEL", b"hash", value, members[1]], [b"HGETALL", b"hash"],
        [b"EXPIRE", b"hash", b"5000"], [b"PFADD", b"log", value], [b"PFCOUNT", b"log"],
        [b"PUBLISH", channel, b"pointer"], [b"PING"],
        script(control_plane._HEARTBEAT_SCRIPT, [replicas], score, value, rng.choice(members)),
        script(commands._LEASE_SWAP_SCRIPT, [name], value, rng.choice(members), b"500000"),
        script(
            hot_keys.REPORT_SCRIPT, [sketch, keys.hot_names(0).encode()], b"4096", b"7200", b"1", score, value,
            members[2],
        ),
        script(staging._STAGE_SCRIPT, [note, channel, live], attempt, generation, b"5", staged),
        script(staging._UNSTAGE_SCRIPT, [note, channel], attempt, generation), [b"GET", note],
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_it_answers_the_same_bytes(redis_url: str, keyspace: Keyspace, seed: int) -> None:
    rng, simulated = random.Random(seed), Simulated(keyspace)
    with real(redis_url) as client:
        client.delete(*(f"{key_name}" for key_name in ("hash", "log")))
        connection = client.connection_pool.get_connection()
        for _ in range(COMMANDS):
            arguments = command(rng, keyspace)
            real_reply = replies(connection, packed(arguments))
            simulated_reply = simulated.send_command(packed(arguments))
            assert parsed(simulated_reply) == real_reply, arguments
        connection.disconnect()
        client.delete("hash", "log")


def replies(connection: Any, packed_command: bytes) -> Any:
    connection.send_packed_command([packed_command])
    return connection.read_response()


def parsed(raw: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(raw)
    return reader.gets()


def test_lives_end_and_are_given_in_milliseconds(keyspace: Keyspace) -> None:
    simulated, clock = Simulated(keyspace), [START]
    simulated.server.clock = lambda: clock[0]
    key = keyspace.overlay("g", "t", "1").encode()
    assert simulated.send_command(packed([b"SET", key, b"v", b"PX", b"1500"])) == b"+OK\r\n"
    clock[0] += 0.5
    assert simulated.send_command(packed([b"PTTL", key])) == b":1000\r\n"
    clock[0] += 1.0
    assert simulated.send_command(packed([b"PTTL", key])) == b":-2\r\n"
    assert simulated.send_command(packed([b"GET", key])) == b"$-1\r\n"


def test_who_listens_hears_what_is_announced(keyspace: Keyspace) -> None:
    simulated, listener_transport = Simulated(keyspace), Ends()
    listener = Session(simulated.server)
    listener.connection_made(listener_transport)
    listener.data_received(packed([b"SUBSCRIBE", keyspace.channel.encode()]))
    simulated.send_command(packed([b"PUBLISH", keyspace.channel.encode(), b"next"]))
    assert listener_transport.written.endswith(b"$4\r\nnext\r\n") and listener_transport.written.startswith(
        b"*3\r\n$9\r\nsubscribe"
    )
