"""L2 on a real server: what is true of replies, deadlines and connections when things go wrong."""

import asyncio
import functools
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path

import orjson
import pytest
import redis
import uvloop

from cache.control.control_keys import Control
from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import L2Result, Overlay, OverlayRead, OverlayWrite, PageRead
from cache.l2.data_plane import Breaker
from cache.l2.sync_clients import connect
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.process.redis_server import RedisServer
from tests.certificates import self_signed
from tests.conftest import redis_binary
from tests.l2_reads import answers_of

SIZE = 64
RECORDS = 32


def page_bytes(page: int) -> bytes:
    """Records that say which they are, with line ends in them."""
    return b"".join(f"page {page} record {slot}\r\n".encode().ljust(SIZE, b"\n") for slot in range(RECORDS))


def read_of(page: int, slot: int) -> PageRead:
    return PageRead("g", "t", page, slot * SIZE, SIZE)


def record_of(page: int, slot: int) -> bytes:
    return page_bytes(page)[slot * SIZE : (slot + 1) * SIZE]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> bool:
    """Polls for at most five seconds."""
    for _ in range(500):
        if await condition():
            return True
        await asyncio.sleep(0.01)
    return False


def reason_of(answer: L2Result) -> str:
    assert isinstance(answer, TierUnavailable), answer
    return str(answer.details["reason"])


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, protocol=2)


@pytest.fixture
def loaded(client: redis.Redis, keyspace: Keyspace) -> Keyspace:
    for page in range(4):
        client.set(keyspace.page("g", "t", page), page_bytes(page))
    return keyspace


@pytest.fixture
async def remote(redis_url: str, loaded: Keyspace) -> AsyncIterator[RemoteTier]:
    tier = RemoteTier(RemoteConfig(redis_url, deadline_s=2.0), loaded)
    yield tier
    await tier.aclose()


async def test_a_page_is_read_without_the_pipelined_pool(remote: RemoteTier) -> None:
    page_read = PageRead("g", "t", 1, 0, len(page_bytes(1)))

    assert await remote.page(page_read) == page_bytes(1)
    assert await remote.page(page_read._replace(page_number=99)) is None
    assert await remote.page(page_read._replace(length_bytes=page_read.length_bytes + 1)) is None
    assert remote.stats.sent_pipelines == remote.stats.sent_commands == 0 and not remote.pool._connections


async def test_connections_are_open_before_the_first_read(
    remote: RemoteTier, client: redis.Redis, loaded: Keyspace
) -> None:
    """With TLS a handshake alone may take longer than a read is given."""
    client_ids_before = {client_info["id"] for client_info in client.client_list()}

    await remote.connect_ahead()
    await remote.connect_ahead()

    assert len({client_info["id"] for client_info in client.client_list()} - client_ids_before) == 1
    assert remote.stats.sent_commands == 0
    unreachable_tier = RemoteTier(RemoteConfig("redis://127.0.0.1:1/0", deadline_s=0.1), loaded)
    await unreachable_tier.connect_ahead()
    await unreachable_tier.aclose()


async def test_a_record_is_exactly_its_bytes_of_the_page(remote: RemoteTier) -> None:
    reads = [read_of(page, slot) for page in range(4) for slot in range(RECORDS)]

    answers = await answers_of(remote, reads)

    assert answers == [record_of(page, slot) for page in range(4) for slot in range(RECORDS)]


async def test_an_absent_page_and_a_short_one_hold_no_record(remote: RemoteTier, client: redis.Redis) -> None:
    """Redis answers GETRANGE on a missing key with an empty string."""
    client.set(remote.control.keyspace.page("g", "t", 8), page_bytes(8)[: SIZE + 5])

    answers = await answers_of(remote, [read_of(7, 0), read_of(8, 0), read_of(8, 1), read_of(0, 0)])

    assert answers == [None, record_of(8, 0), None, record_of(0, 0)]


async def test_all_reads_of_one_turn_travel_in_one_pipeline_on_one_connection(remote: RemoteTier) -> None:
    await remote.control.execute("PING")
    callers = [answers_of(remote, [read_of(0, slot), read_of(1, slot)]) for slot in range(RECORDS)]

    answers = await asyncio.gather(*callers)

    assert answers == [[record_of(0, slot), record_of(1, slot)] for slot in range(RECORDS)]
    assert remote.stats.sent_pipelines == 1 and remote.stats.sent_commands == 2 * RECORDS


async def test_a_turn_too_large_for_one_pipeline_is_split_between_callers(redis_url: str, loaded: Keyspace) -> None:
    remote = RemoteTier(RemoteConfig(redis_url, deadline_s=2.0, batch_commands_max=10), loaded)

    answers = await asyncio.gather(*(answers_of(remote, [read_of(0, slot)] * 4) for slot in range(RECORDS)))
    await remote.aclose()

    assert answers == [[record_of(0, slot)] * 4 for slot in range(RECORDS)]
    assert remote.stats.sent_pipelines == RECORDS // 2


async def test_an_overlay_is_written_with_its_expiry_and_read_with_what_is_left(
    remote: RemoteTier, client: redis.Redis
) -> None:
    """Life is read with the value, and no overlay is ever without an end."""
    payload = bytes(range(256)) + b"\r\n$5\r\n"
    write = OverlayWrite("g", "t", "00ff", payload, 30.0)

    assert await remote.write_overlays([write]) == [None]
    client.pexpire(remote.control.keyspace.overlay("g", "t", "00ff"), 9_000)
    overlay, none = await answers_of(remote, [OverlayRead("g", "t", "00ff"), OverlayRead("g", "t", "00fe")])

    assert isinstance(overlay, Overlay) and overlay.overlay_value == payload
    assert 8.0 < overlay.remaining_ttl_s <= 9.0
    assert none is None


async def test_every_overlay_written_expires_however_short_its_life(remote: RemoteTier, client: redis.Redis) -> None:
    writes = [OverlayWrite("g", "t", f"{n:04x}", b"x", ttl_s) for n, ttl_s in enumerate([1e-9, 60])]

    await remote.write_overlays(writes)

    lives = [client.pttl(remote.control.keyspace.overlay("g", "t", write.hash_hex)) for write in writes]
    assert all(life != -1 for life in lives)
    assert 0 < lives[1] <= 60_000


async def test_an_overlay_without_expiry_has_no_life_left(remote: RemoteTier, client: redis.Redis) -> None:
    """Somebody else's key is not promoted for ever."""
    client.set(remote.control.keyspace.overlay("g", "t", "aa"), b"x")

    assert await answers_of(remote, [OverlayRead("g", "t", "aa")]) == [Overlay(b"x", 0.0)]


async def test_pages_overlays_and_writes_of_one_turn_do_not_mix_up_replies(remote: RemoteTier) -> None:
    writes = [OverlayWrite("g", "t", f"{n:04x}", b"%d" % n, 60) for n in range(20)]
    await remote.write_overlays(writes)

    async def read_and_write(number: int) -> tuple[list[L2Result], list[TierUnavailable | None]]:
        read = answers_of(remote, [OverlayRead("g", "t", f"{number:04x}"), read_of(1, number)])
        write = remote.write_overlays([OverlayWrite("g", "other", f"{number}", b"y", 60)])
        return await asyncio.gather(read, write)

    for number, (answers, written) in enumerate(
        await asyncio.gather(*(read_and_write(number) for number in range(20)))
    ):
        overlay, page = answers
        assert isinstance(overlay, Overlay) and overlay.overlay_value == b"%d" % number
        assert page == record_of(1, number) and written == [None]


async def test_a_key_of_the_wrong_type_is_an_error_of_that_read_alone(remote: RemoteTier, client: redis.Redis) -> None:
    client.hset(remote.control.keyspace.page("g", "t", 9), "a", "b")

    good, failed_answer = await answers_of(remote, [read_of(0, 0), read_of(9, 0)])

    assert good == record_of(0, 0) and reason_of(failed_answer) == "connection"
    assert remote.breaker.state == "closed"


async def test_cancelled_callers_never_leave_another_one_their_answer(remote: RemoteTier) -> None:
    """Hundreds of reads, a third of them cancelled at random moments; each answer is its asker's."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)

    async def read_record(page: int, slot: int) -> None:
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        assert await answers_of(remote, [read_of(page, slot)]) == [record_of(page, slot)], seed

    for _ in range(30):
        callers = [asyncio.create_task(read_record(rng.randrange(4), rng.randrange(RECORDS))) for _ in range(30)]
        for caller in rng.sample(callers, 10):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            caller.cancel()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    assert remote.pool.opened <= remote.config.connections_max, "a caller that leaves costs no connection"


async def elapsed_after(seconds: float) -> float:
    """What a wait of so long takes here, in seconds."""
    started_at = time.monotonic()
    await asyncio.sleep(seconds)
    return time.monotonic() - started_at


async def test_a_connection_that_timed_out_is_closed_and_its_late_replies_reach_no_caller(
    own_redis: RedisServer,
) -> None:
    keyspace = Keyspace("paused")
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        for page in range(4):
            client.set(keyspace.page("g", "t", page), page_bytes(page))
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=0.1, connections_max=1), keyspace)
    assert await answers_of(remote, [read_of(0, 0)]) == [record_of(0, 0)]

    os.kill(own_redis.pid, signal.SIGSTOP)
    started_at = time.monotonic()
    reading = asyncio.gather(*(answers_of(remote, [read_of(1, slot)]) for slot in range(5)))
    waiting = asyncio.ensure_future(elapsed_after(0.1))  # a host that stalls delays both
    late = await asyncio.wait_for(reading, 5)
    took_s = time.monotonic() - started_at
    os.kill(own_redis.pid, signal.SIGCONT)

    assert {reason_of(answer) for (answer,) in late} == {"timeout"}
    assert took_s < await waiting * 1.5
    assert await answers_of(remote, [read_of(2, 7)]) == [record_of(2, 7)]
    assert remote.pool.opened == 2 and remote.pool.timed_out == 1
    await remote.aclose()


async def test_one_stall_is_one_failure_whatever_waited_for_it(own_redis: RedisServer) -> None:
    breaker = Breaker(failure_threshold=2, cooldown_s=60.0)
    config = RemoteConfig(own_redis.url, deadline_s=0.1, connections_max=1)
    remote = RemoteTier(config, Keyspace("stalled"), breaker)
    assert await answers_of(remote, [read_of(0, 0)]) == [None]

    os.kill(own_redis.pid, signal.SIGSTOP)
    reading = []
    for slot in range(5):  # a pipeline each
        reading.append(asyncio.ensure_future(answers_of(remote, [read_of(1, slot)])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    late = await asyncio.wait_for(asyncio.gather(*reading), 5)
    os.kill(own_redis.pid, signal.SIGCONT)

    assert {reason_of(answer) for (answer,) in late} == {"timeout"} and remote.stats.sent_pipelines == 6
    assert await answers_of(remote, [read_of(1, 0)]) == [None], "Redis is asked again at once"
    assert breaker.opened == 0
    await remote.aclose()


async def test_a_callers_shorter_deadline_ends_its_wait_and_keeps_the_connection(own_redis: RedisServer) -> None:
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=5.0, connections_max=1), Keyspace("a"))
    await answers_of(remote, [read_of(0, 0)])

    os.kill(own_redis.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await answers_of(remote, [read_of(0, 0)])
    patient = asyncio.create_task(answers_of(remote, [read_of(0, 1)]))
    await asyncio.sleep(0)
    os.kill(own_redis.pid, signal.SIGCONT)

    assert await patient == [None]
    assert remote.pool.opened == 1 and remote.breaker.state == "closed"
    await remote.aclose()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reply_that_came_while_the_loop_was_busy_is_not_late(
    own_redis: RedisServer, run: Callable[[Coroutine[None, None, list[L2Result]]], list[L2Result]]
) -> None:
    """After a long socket callback uvloop fires its timers before it looks at the other sockets."""

    def busy(bell: socket.socket) -> None:
        bell.recv(1)
        os.kill(own_redis.pid, signal.SIGCONT)
        time.sleep(0.4)

    async def read_while_busy() -> list[L2Result]:
        remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=0.3), Keyspace("a"))
        await answers_of(remote, [read_of(0, 0)])
        bell, rings = socket.socketpair()
        asyncio.get_running_loop().add_reader(bell, busy, bell)
        os.kill(own_redis.pid, signal.SIGSTOP)
        reading = asyncio.create_task(answers_of(remote, [read_of(0, 1)]))
        for _ in range(3):
            await asyncio.sleep(0)
        rings.send(b"x")
        answers = await reading
        asyncio.get_running_loop().remove_reader(bell)
        bell.close()
        rings.close()
        await remote.aclose()
        return answers

    assert run(read_while_busy()) == [None]


async def test_a_dead_redis_is_reported_at_once_then_left_alone_then_probed(own_redis: RedisServer) -> None:
    clock = [0.0]
    breaker = Breaker(failure_threshold=3, cooldown_s=5.0, monotonic_clock=lambda: clock[0])
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=1.0), Keyspace("a"), breaker)
    assert await answers_of(remote, [read_of(0, 0)]) == [None]

    os.kill(own_redis.pid, signal.SIGKILL)
    reasons = [reason_of((await answers_of(remote, [read_of(0, 0)]))[0]) for _ in range(6)]
    assert set(reasons[:3]) == {"connection"} and set(reasons[3:]) == {"breaker_open"}

    clock[0] = 5.0
    probes = await asyncio.gather(answers_of(remote, [read_of(0, 0)]), answers_of(remote, [read_of(0, 1)]))
    assert {reason_of(answer) for (answer,) in probes} == {"connection"}, "one pipeline is one probe"
    assert reason_of((await answers_of(remote, [read_of(0, 0)]))[0]) == "breaker_open"
    await remote.aclose()


async def test_reads_recover_by_themselves_when_redis_answers_again(own_redis: RedisServer) -> None:
    breaker = Breaker(failure_threshold=1, cooldown_s=0.01)
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=0.05), Keyspace("a"), breaker)
    await answers_of(remote, [read_of(0, 0)])

    os.kill(own_redis.pid, signal.SIGSTOP)
    assert reason_of((await answers_of(remote, [read_of(0, 0)]))[0]) == "timeout"
    assert breaker.opened == 1
    os.kill(own_redis.pid, signal.SIGCONT)

    async def answers() -> bool:
        return await answers_of(remote, [read_of(0, 0)]) == [None]

    assert await eventually(answers)
    assert breaker.state == "closed"
    await remote.aclose()


async def test_connections_stay_within_their_bound_and_end_with_the_tier(own_redis: RedisServer) -> None:
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=2.0, connections_max=2), Keyspace("a"))

    for _ in range(5):
        await asyncio.gather(*(answers_of(remote, [read_of(0, n)] * 500) for n in range(20)))
    during = len(client.client_list())
    await remote.aclose()

    assert during <= 2 + 1

    async def has_one_client() -> bool:
        return len(client.client_list()) == 1

    assert await eventually(has_one_client)
    client.close()


async def test_a_server_that_accepts_no_more_connections_is_not_asked_again_and_again(own_redis: RedisServer) -> None:
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=2.0, connections_max=8), Keyspace("a"))
    await answers_of(remote, [read_of(0, 0)])
    client.config_set("maxclients", 2)
    rejected_before = int(client.info("stats")["rejected_connections"])

    for _ in range(50):
        await asyncio.gather(*(answers_of(remote, [read_of(0, n)] * 600) for n in range(4)))

    assert remote.pool.opened == 1 and remote.breaker.state == "closed"
    assert 1 <= int(client.info("stats")["rejected_connections"]) - rejected_before <= 3
    client.close()
    await remote.aclose()


async def test_what_is_under_way_ends_when_the_tier_is_closed(own_redis: RedisServer) -> None:
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=30.0), Keyspace("a"))
    await answers_of(remote, [read_of(0, 0)])
    os.kill(own_redis.pid, signal.SIGSTOP)
    reading = asyncio.create_task(answers_of(remote, [read_of(0, 0)]))
    for _ in range(3):
        await asyncio.sleep(0)

    await remote.aclose()
    os.kill(own_redis.pid, signal.SIGCONT)

    assert reason_of((await reading)[0]) == "connection"


async def test_more_commands_than_may_be_under_way_are_shed(redis_url: str, loaded: Keyspace) -> None:
    """A slow Redis does not become a queue in this process."""
    config = RemoteConfig(redis_url, deadline_s=2.0, commands_in_flight_max=10)
    remote = RemoteTier(config, loaded)

    first, second = await asyncio.gather(answers_of(remote, [read_of(0, 0)] * 10), answers_of(remote, [read_of(0, 0)]))

    assert first == [record_of(0, 0)] * 10
    assert reason_of(second[0]) == "timeout" and remote.stats.shed_commands == 1
    assert await answers_of(remote, [read_of(0, 0)]) == [record_of(0, 0)]
    await remote.aclose()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        (b"$3\r\nabc\r\n", True),
        (b"$3\r\nabc\r\n$3\r\nxyz\r\n", True),
        (b"$3\r\nab", False),
        (b"?nonsense\r\n", False),
        (b"", False),
    ],
    ids=["whole", "one-too-many", "cut-off", "garbage", "closed"],
)
async def test_a_server_that_breaks_the_protocol_loses_its_connection(reply: bytes, good: bool) -> None:
    """An unasked-for reply would be taken for the next caller's."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(4096):
            setup = b"CLIENT" in command or b"SELECT" in command
            writer.write(b"+OK\r\n" * command.count(b"*") if setup else reply)
            await writer.drain()
            if not setup and not good:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    remote = RemoteTier(RemoteConfig(url, deadline_s=2.0, connections_max=1), Keyspace("a"))
    for expected in range(1, 3):
        answer = (await answers_of(remote, [PageRead("g", "t", 0, 0, 3)]))[0]
        for _ in range(5):
            await asyncio.sleep(0)
        if good:
            assert answer == b"abc"
        else:
            assert reason_of(answer) == "connection"
        if reply != b"$3\r\nabc\r\n":
            assert remote.pool.opened == expected, "never used again"
    await remote.aclose()
    server.close()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_the_protocol_is_the_one_that_is_named_and_news_arrive_in_both(
    redis_url: str, loaded: Keyspace, client: redis.Redis, protocol: int
) -> None:
    """A changed default of the client library must not silence what keeps readers current."""
    url = redis_url if protocol == 2 else f"{redis_url}?protocol=3"
    remote = RemoteTier(RemoteConfig(url, deadline_s=2.0), loaded)
    assert await answers_of(remote, [read_of(0, 0)]) == [record_of(0, 0)]

    messages: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        async for message in remote.control.subscribe():
            messages.put_nowait(message)

    listening = asyncio.create_task(listen())

    async def heard() -> bool:
        return bool(client.publish(loaded.channel, "pointer"))

    assert await eventually(heard)
    assert await asyncio.wait_for(messages.get(), 5) == b"pointer"
    connections = [client_info["resp"] for client_info in client.client_list() if "resp" in client_info]
    assert str(protocol) in connections
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await remote.aclose()


async def test_listening_survives_a_silence_longer_than_any_timeout(
    redis_url: str, keyspace: Keyspace, client: redis.Redis
) -> None:
    """News are rare, and a listener that timed out would be told nothing."""
    config = RemoteConfig(redis_url, control_timeout_s=0.05)
    remote = RemoteTier(config, keyspace)
    listening = asyncio.ensure_future(anext(remote.control.subscribe()))

    async def listened_to() -> bool:
        return bool(client.pubsub_numsub(keyspace.channel)[0][1])

    assert await eventually(listened_to)
    finished_tasks, _ = await asyncio.wait({listening}, timeout=4 * config.control_timeout_s)
    assert not finished_tasks
    client.publish(keyspace.channel, "pointer")

    assert await asyncio.wait_for(listening, 5) == b"pointer"
    await remote.aclose()


async def test_listening_ends_with_the_reason_when_the_connection_does(own_redis: RedisServer) -> None:
    remote = RemoteTier(RemoteConfig(own_redis.url), Keyspace("a"))
    listening = asyncio.ensure_future(anext(remote.control.subscribe()))
    client = redis.Redis.from_url(own_redis.url, protocol=2)

    async def listened_to() -> bool:
        return bool(client.pubsub_channels())

    assert await eventually(listened_to)
    client.close()
    os.kill(own_redis.pid, signal.SIGKILL)

    with pytest.raises(TierUnavailable):
        await asyncio.wait_for(listening, 5)
    await remote.aclose()


async def test_pointer_heartbeat_and_policy(remote: RemoteTier, client: redis.Redis) -> None:
    keyspace = remote.control.keyspace
    assert await remote.control.watch() == (None, None)
    client.set(keyspace.live, b"{}")
    client.set(keyspace.staging_note, b"note")
    assert await remote.control.watch() == (b"{}", b"note")
    redis_time_s = client.time()[0]
    assert redis_time_s <= await remote.control.time() < redis_time_s + 2
    assert await remote.control.eviction_policy() == "volatile-lru"
    (info,) = await remote.control.infos()
    assert info["used_memory"] > 0 and info["maxmemory"] == 0

    await remote.control.heartbeat(b'{"holds":["a"]}', 100.0)
    await remote.control.heartbeat(b'{"holds":["b"]}', 101.0, b'{"holds":["a"]}')
    await remote.control.heartbeat(b'{"holds":["a"]}', 102.0)

    beats = client.zrange(keyspace.replicas, 0, -1, withscores=True)
    assert beats == [(b'{"holds":["b"]}', 101.0), (b'{"holds":["a"]}', 102.0)]
    assert client.ttl(keyspace.replicas) == -1, "evictable if it could expire"
    await remote.control.sign_off(b'{"holds":["b"]}')
    assert client.zcard(keyspace.replicas) == 1


async def test_a_replica_is_alive_at_full_memory(own_redis: RedisServer) -> None:
    keyspace = Keyspace("full")
    remote = RemoteTier(RemoteConfig(own_redis.url), keyspace)
    with connect(own_redis.url, 5.0) as client:
        control = Control(client, keyspace)
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.zadd(keyspace.replicas, {b"{}": 1.0})

        previous_payload = None
        for held_generations in (["a"], ["b"]):
            payload = orjson.dumps({"replica": "replica-1", "holds": held_generations})
            await remote.control.heartbeat(payload, await remote.control.time(), previous_payload)
            (alive,) = control.replicas()
            assert (alive.name, list(alive.held_generations)) == ("replica-1", held_generations)
            previous_payload = payload
        assert client.zcard(keyspace.replicas) == 1
        await remote.control.sign_off(payload)
        assert control.replicas() == []
    await remote.aclose()


async def test_an_unreachable_redis_is_one_kind_of_error_for_control_commands_too() -> None:
    remote = RemoteTier(RemoteConfig("redis://127.0.0.1:1/0"), Keyspace("a"))
    control = remote.control
    ping = functools.partial(control.execute, "PING")

    for command in (ping, control.watch, control.time, control.eviction_policy, control.infos):
        with pytest.raises(TierUnavailable) as caught:
            await command()
        assert caught.value.details["reason"] == "connection"
    assert reason_of((await answers_of(remote, [read_of(0, 0)]))[0]) == "connection"
    await remote.aclose()


async def test_a_user_and_password_in_the_url_are_used_and_a_wrong_one_is_no_answer(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">se/cret", "~larder:1:a:*", "+getrange", "+select")
        client.select(3)
        client.set(Keyspace("a").page("g", "t", 0), page_bytes(0))
    address = own_redis.url.removeprefix("redis://").removesuffix("/0")

    for password, expected in (("se%2Fcret", record_of(0, 2)), ("wrong", None)):
        url = f"redis://reader:{password}@{address}/3"
        remote = RemoteTier(RemoteConfig(url, deadline_s=2.0), Keyspace("a"))
        answer = (await answers_of(remote, [read_of(0, 2)]))[0]
        await remote.aclose()
        if expected is None:
            assert reason_of(answer) == "connection"
            assert "wrong" not in str(answer), "a password is never part of a message"
        else:
            assert answer == expected


@pytest.fixture
def tls(tmp_path: Path, own_redis: RedisServer) -> tuple[int, Path]:
    """A port of the server that speaks TLS, and the certificate to trust."""
    settings = self_signed(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings["tls-port"] = str(free.getsockname()[1])
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        try:
            for name, value in settings.items():
                client.config_set(name, value)
        except redis.RedisError:
            pytest.skip(f"{redis_binary().name} was built without TLS")
    return int(settings["tls-port"]), Path(settings["tls-ca-cert-file"])


async def test_tls_is_a_matter_of_the_url(own_redis: RedisServer, tls: tuple[int, Path]) -> None:
    port, certificate = tls
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.set(Keyspace("a").page("g", "t", 0), page_bytes(0))
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
    remote = RemoteTier(RemoteConfig(url, deadline_s=2.0), Keyspace("a"))

    assert await answers_of(remote, [read_of(0, 5)] * 100) == [record_of(0, 5)] * 100
    await remote.aclose()


def test_the_same_on_the_event_loop_of_production(redis_url: str, loaded: Keyspace) -> None:
    """Taking over a transport is the loop's business, and uvloop is another loop."""

    async def run() -> list[list[L2Result]]:
        remote = RemoteTier(RemoteConfig(redis_url, deadline_s=2.0), loaded)
        try:
            return await asyncio.gather(*(answers_of(remote, [read_of(0, n)] * 9) for n in range(RECORDS)))
        finally:
            await remote.aclose()

    assert uvloop.run(run()) == [[record_of(0, n)] * 9 for n in range(RECORDS)]


async def test_what_the_slowest_round_trips_of_the_last_seconds_took_is_known(
    remote: RemoteTier, client: redis.Redis
) -> None:
    client.set(remote.control.keyspace.page("g1", "user_topk", 0), b"0123456789")
    assert remote.p99_ms() is None

    for _ in range(20):
        await answers_of(remote, [PageRead("g1", "user_topk", 0, 2, 3)])

    p99_ms = remote.p99_ms()
    assert p99_ms is not None and 0 < p99_ms < 5_000
    assert remote.p99_ms(window_s=-1.0) is None  # nothing is younger than that


async def test_what_one_caller_cannot_keep_costs_the_others_of_its_turn_nothing(own_redis: RedisServer) -> None:
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=5.0), Keyspace("a"))

    def fail(_answers: object) -> int:
        raise ValueError("a defect")

    failing_read = remote.submit([read_of(0, 0)], fail)
    good = remote.submit([read_of(0, 0), read_of(0, 1)], len)

    assert await good == 2 and remote.stats.sent_pipelines == 1
    with pytest.raises(ValueError, match="a defect"):
        await failing_read
    await remote.aclose()


async def test_no_read_takes_longer_than_its_bound_says(own_redis: RedisServer) -> None:
    """Who has more time than that needs no clock of its own."""
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=0.02), Keyspace("a"))
    idle_s = remote.bound_s()

    waiting = remote.submit([read_of(0, 0)] * 500, len)
    busy_s = remote.bound_s()

    # 500 more commands may take one more deadline, and a check that takes a twentieth of it.
    assert 0.02 < idle_s < busy_s == pytest.approx(idle_s + 0.02 + 0.001)
    await waiting
    await remote.aclose()


async def test_writes_that_are_refused_say_nothing_of_reads(own_redis: RedisServer) -> None:
    keyspace, breaker = Keyspace("full"), Breaker(failure_threshold=2, cooldown_s=60.0)
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=2.0), keyspace, breaker)
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.set(keyspace.page("g", "t", 0), page_bytes(0))
        client.config_set("maxmemory", "100kb")
        client.config_set("maxmemory-policy", "noeviction")

    for number in range(6):
        write = OverlayWrite("g", "t", f"{number:016x}", b"x" * SIZE, 60)
        (write_error,) = await remote.write_overlays([write])
        assert write_error is not None and "OOM" in str(write_error)

    assert breaker.opened == 0
    assert await answers_of(remote, [read_of(0, 3)]) == [record_of(0, 3)]
    await remote.aclose()


async def test_a_server_that_became_a_replica_in_place_is_left_once_a_write_tells(own_redis: RedisServer) -> None:
    keyspace = Keyspace("demoted")
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=2.0, connections_max=1), keyspace)
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.set(keyspace.page("g", "t", 0), page_bytes(0))
        assert await answers_of(remote, [read_of(0, 1)]) == [record_of(0, 1)]
        client.replicaof("127.0.0.1", "1")  # where nobody is

        for _ in range(3):  # no more than once: perhaps there is no other
            with pytest.raises(TierUnavailable, match="read only replica"):
                await remote.control.heartbeat(b"{}", 0.0, None)
            assert await answers_of(remote, [read_of(0, 2)]) == [record_of(0, 2)]
        assert remote.pool.opened == 2

        client.replicaof("NO", "ONE")
    await remote.control.heartbeat(b"{}", 0.0, None)
    await remote.aclose()
