"""What each user of infra/redis.conf may do, on a real server started with that very file."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.format.redis_keys import Keyspace
from cache.l2.commands import LeaseMark, LeaseSwap, LeaseTake, Overlay, OverlayRead, OverlayWrite, PageRead
from cache.l2.data_plane import Breaker
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.process.child_process import GuardedCommand
from cache.process.redis_server import SERVER_SETTINGS, find_server
from cache.store.releases import Pointer
from cache.usage.hot_keys import COLD_WINDOW, HotKeyReport, SharedHotKeys
from infra.cli.check import check_redis
from precompute.config.settings import NightConfig
from precompute.releases.staging import StagingNote
from tests.l2_reads import answers_of
from tests.polling import poll_until

CONF = Path(__file__).parents[3] / "infra/redis.conf"
KEYS = Keyspace("default")
POINTER = Pointer("20260101T000000Z-000000000001", 1, None, "test", 0.0)


def configured(reader: str, loader: str) -> str:
    """Fill the file as compose.yaml does."""
    text = CONF.read_text()
    for role, password in (("READER", reader), ("LOADER", loader)):
        digest = hashlib.sha256(password.encode()).hexdigest()
        text = text.replace(f"{role}_PASSWORD_SHA256", digest)
    return text


def answering(path: Path) -> bool:
    never = Retry(NoBackoff(), 0)
    with redis.Redis(unix_socket_path=str(path), protocol=2, retry=never) as anonymous:
        try:
            return bool(anonymous.ping())
        except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError):
            return True
        except redis.exceptions.ConnectionError:
            return False


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server with our configuration, reachable over a unix socket only."""
    folder = tmp_path_factory.mktemp("acl")
    (folder / "redis.conf").write_text(configured("reads", "loads"))
    path = folder / "redis.sock"
    command: list[str | Path] = [find_server(), folder / "redis.conf", "--port", "0", "--unixsocket", path]
    with GuardedCommand(command, log_path=folder / "log") as process:
        assert poll_until(lambda: answering(path)), process.log_tail()
        yield path


def client(socket: Path, user: str, password: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), username=user, password=password, protocol=2)


@pytest.fixture
def loader(socket: Path) -> Iterator[redis.Redis]:
    """The night's connection."""
    with client(socket, "larder-loader", "loads") as connection:
        yield connection


@pytest.fixture
def reader(socket: Path) -> Iterator[redis.Redis]:
    """A plain connection with the service's rights."""
    with client(socket, "larder-reader", "reads") as connection:
        yield connection


async def test_the_service_can_do_its_work_with_the_readers_rights(
    socket: Path, loader: redis.Redis, reader: redis.Redis
) -> None:
    loader.set(KEYS.page("g1", "user_topk", 0), b"0123456789")
    loader.set(KEYS.live, b"{}")
    assert reader.exists(KEYS.live)
    remote = RemoteTier(RemoteConfig(f"unix://larder-reader:reads@{socket}", deadline_s=5.0), KEYS, Breaker())
    overlay = OverlayRead("g1", "user_topk", "ab")

    await remote.control.execute("PING")
    assert await remote.control.watch() == (b"{}", None)
    assert await remote.control.time() > 0
    assert await answers_of(remote, [PageRead("g1", "user_topk", 0, 2, 3)]) == [b"234"]
    write_errors = await remote.write_overlays([OverlayWrite(*overlay, b"payload", 60.0)])
    assert write_errors == [None]
    (stored_overlay,) = await answers_of(remote, [overlay])
    assert isinstance(stored_overlay, Overlay)
    assert stored_overlay.overlay_value == b"payload"
    lease_mark = LeaseMark(KEYS.lease(*overlay, bytes(16)), b"replica/1")
    assert await remote.lease(LeaseTake(*lease_mark, 60_000)) is None
    assert await remote.lease(LeaseTake(lease_mark.lease_key, b"replica/2", 60_000)) == lease_mark.holder_token
    assert await remote.lease(LeaseSwap(*lease_mark, lease_mark.holder_token, 60_000)) == lease_mark.holder_token
    marked = OverlayWrite(*overlay, b"payload", 60.0, lease_mark)
    assert await remote.write_overlays([marked, marked._replace(lease_mark=None)]) == [None, None]
    assert await remote.lease(LeaseTake(*lease_mark, 60_000)) == b"done:replica/1"
    assert await remote.lease(LeaseSwap(*lease_mark, lease_mark.holder_token, 60_000)) is None
    await SharedHotKeys(remote.control).add_report(HotKeyReport(5, [(("user_topk", b"u1"), 2)], [("user_topk", b"u2")]))
    assert await SharedHotKeys(remote.control).fetch_names(5) == [("user_topk", b"u1")]
    cold = HotKeyReport(5, [(("user_topk", b"u3"), 2)], [("user_topk", b"u4")], COLD_WINDOW)
    await SharedHotKeys(remote.control).add_report(cold)
    assert await SharedHotKeys(remote.control).fetch_names(5, COLD_WINDOW) == [("user_topk", b"u3")]
    read = KEYS.read_entities("g1", "user_topk")
    await remote.control.execute("PFADD", read, b"12345678", b"87654321")
    await remote.control.execute("EXPIRE", read, 60)
    assert await remote.control.execute("PFCOUNT", read) == 2
    await remote.control.execute("HSET", KEYS.quality_figures, "replica-1", b"{}")
    await remote.control.execute("EXPIRE", KEYS.quality_figures, 60)
    assert await remote.control.execute("HGETALL", KEYS.quality_figures) == {b"replica-1": b"{}"}
    assert await remote.control.execute("HDEL", KEYS.quality_figures, "replica-1") == 1
    assert await remote.control.eviction_policy() == "volatile-lru"
    assert (await remote.control.infos())[0]["used_memory"] > 0
    loader.hset(KEYS.generations, "g1", "{}")
    write_commands = [("HSET", key, "w", "{}") for key in (KEYS.dashboard_workers, KEYS.dashboard_bin(10))]
    assert await remote.control.execute_all([*write_commands, ("EXPIRE", KEYS.dashboard_bin(10), 60)]) == [1, 1, 1]
    read_commands = [("HGETALL", key) for key in (KEYS.dashboard_workers, KEYS.dashboard_bin(10), KEYS.generations)]
    assert await remote.control.execute_all(read_commands) == [{b"w": b"{}"}, {b"w": b"{}"}, {b"g1": b"{}"}]
    assert await remote.control.execute_all([("HDEL", KEYS.dashboard_workers, "w")]) == [1]
    assert [server_info["maxmemory_policy"] for server_info in await remote.control.infos()] == ["volatile-lru"]
    loader.hdel(KEYS.generations, "g1")
    await remote.control.heartbeat(b"{}", 1.0)
    await remote.control.heartbeat(b'{"holds":[]}', 2.0, b"{}")
    assert loader.zrangebyscore(KEYS.replicas, "-inf", "+inf") == [b'{"holds":[]}']
    await remote.control.sign_off(b'{"holds":[]}')
    assert loader.zrangebyscore(KEYS.replicas, "-inf", "+inf") == []
    await remote.aclose()


def test_the_service_hears_of_a_publish(reader: redis.Redis, loader: redis.Redis) -> None:
    with reader.pubsub(ignore_subscribe_messages=True) as subscription:
        subscription.subscribe(KEYS.channel)
        heard = []

        def listen() -> bool:
            Control(loader, KEYS).announce("pointer")
            message = subscription.get_message(timeout=0.1)
            heard.extend([message] if message else [])
            return bool(heard)

        assert poll_until(listen)


@pytest.mark.parametrize(
    "command",
    [
        ("SET", KEYS.live, "{}"),
        ("SET", KEYS.page("g1", "user_topk", 0), "x"),
        ("SETRANGE", KEYS.page("g1", "user_topk", 0), "0", "x"),
        ("UNLINK", KEYS.page("g1", "user_topk", 0)),
        ("DEL", KEYS.live),
        ("SET", KEYS.staging_note, "{}"),
        ("ZINCRBY", KEYS.replicas, "1", "x"),
        ("ZINCRBY", KEYS.live, "1", "x"),
        ("ZREVRANGE", KEYS.replicas, "0", "-1"),
        ("EXPIRE", KEYS.page("g1", "user_topk", 0), "1"),
        ("ZADD", KEYS.hot_names(1), "1", "x"),
        ("SET", KEYS.hot_names(1), "x"),
        ("UNLINK", KEYS.hot_names(1)),
        ("SET", KEYS.cold_names(1), "x"),
        ("UNLINK", KEYS.read_entities("g1", "user_topk")),
        ("PFADD", KEYS.live, "x"),
        ("HSET", KEYS.live, "x", "x"),
        ("HSET", "larder:1:{other}:quality", "x", "x"),
        ("HSET", KEYS.generations, "g", "{}"),
        ("ZINCRBY", "larder:1:{other}:hot:1", "1", "x"),
        ("HSET", KEYS.generations, "g1", "live"),
        ("HDEL", KEYS.generations, "g1"),
        ("EXPIRE", KEYS.generations, "1"),
        ("GET", KEYS.generations),
        ("SET", KEYS.dashboard_bin(10), "x"),
        ("UNLINK", KEYS.dashboard_workers),
        ("HSET", "larder:1:{other}:dash:workers", "w", "x"),
        ("HGETALL", KEYS.replicas),
        ("SET", "larder:1:other:w:g1:user_topk:ab", "x"),
        ("GET", "somebody-elses-key"),
        ("EVAL", "return redis.call('SET', KEYS[1], '')", "1", KEYS.live),
        ("PUBLISH", KEYS.channel, "pointer"),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SHUTDOWN",),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_service_can_neither_move_the_pointer_nor_touch_a_page(
    reader: redis.Redis, command: tuple[str, ...]
) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        reader.execute_command(*command)


@pytest.mark.parametrize(
    "call",
    [
        f"'SET', '{KEYS.live}', ''",
        f"'DEL', '{KEYS.live}'",
        f"'SET', '{KEYS.staging_note}', ''",
        f"'SET', '{KEYS.page('g1', 'user_topk', 0)}', 'x'",
        f"'HSET', '{KEYS.generations}', 'g1', 'live'",
        f"'UNLINK', '{KEYS.overlay('g1', 'user_topk', 'ab')}'",
        f"'ZINCRBY', '{KEYS.replicas}', '1', 'x'",
        f"'ZADD', '{KEYS.hot_names(1)}', '1', 'x'",
        f"'PUBLISH', '{KEYS.channel}', 'pointer'",
        "'FLUSHALL'",
    ],
)
def test_a_script_of_the_service_reaches_no_further_than_the_service(
    reader: redis.Redis, loader: redis.Redis, call: str
) -> None:
    loader.set(KEYS.live, b"{}")
    for keys in ((), (KEYS.replicas,), (KEYS.live,), (KEYS.hot_names(1),)):
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can't"):
            reader.eval(f"return redis.call({call})", len(keys), *keys)
    assert loader.get(KEYS.live) == b"{}"


def test_status_counts_replicas_with_the_loaders_rights(reader: redis.Redis, loader: redis.Redis) -> None:
    control = Control(loader, KEYS)
    now_s = control.time()
    reader.zadd(KEYS.replicas, {b"silent": now_s - 3_600.0, b"forgotten": now_s - 2 * 86_400.0})

    assert control.replicas() == []
    assert control.count_silent_replicas() == 1
    assert control.forget_dead_replicas(silence_max_s=0.0) == 2


def test_the_night_can_do_its_work_with_the_loaders_rights(loader: redis.Redis) -> None:
    control = Control(loader, KEYS)
    page = KEYS.page("g1", "user_topk", 1)
    loader.delete(KEYS.live)

    assert control.check_eviction_policy() == "volatile-lru"
    with loader.pipeline(transaction=False) as pipeline:
        pipeline.set(page, b"0123456789")
        assert pipeline.execute() == [True]
    assert loader.setrange(page, 8, b"89ab") == 12
    assert loader.strlen(page) == 12
    loader.hset(KEYS.loaded_parts("g1"), "user_topk/0", "digest")
    assert loader.getrange(page, 0, 1) == b"01"
    assert "cmdstat_getrange" in loader.info("commandstats", "cpu", "replication")
    moved = control.move_pointer(
        POINTER, expected_epoch=0, row_by_generation={POINTER.generation: RegistryRow(GenerationState.LIVE, 0.0)}
    )
    assert moved == POINTER
    assert control.read_pointer() == POINTER
    assert control.rows()[POINTER.generation].state == GenerationState.LIVE
    assert control.replicas() == []
    stage = StagingNote(control)
    assert stage.set("g2", "test") is None and stage.get() is not None
    stage.clear("test")
    assert loader.get(KEYS.staging_note) is None
    assert loader.info("memory")["maxmemory"] == 2 << 30
    assert loader.unlink(page, KEYS.loaded_parts("g1")) == 2


def test_the_night_takes_an_erased_entity_out_of_the_sketch(loader: redis.Redis, reader: redis.Redis) -> None:
    for key in (KEYS.hot_names(7), KEYS.cold_names(7)):
        reader.zincrby(key, 1.0, "user_topk:u1")

        assert loader.zrevrange(key, 0, -1) == [b"user_topk:u1"]
        assert loader.zrem(key, "user_topk:u1") == 1


def test_the_night_removes_an_overlay_that_it_can_neither_read_nor_write(
    loader: redis.Redis, reader: redis.Redis
) -> None:
    overlay = KEYS.overlay("g1", "user_topk", "ac")
    reader.set(overlay, "x", px=60_000)
    with pytest.raises(redis.exceptions.NoPermissionError):
        loader.get(overlay)

    assert loader.unlink(overlay) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("SHUTDOWN",),
        ("SET", KEYS.overlay("g1", "user_topk", "ab"), "x"),
        ("SET", "larder:1:{other}:live", "{}"),
        ("ACL", "LIST"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_night_stays_within_its_namespace(loader: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        loader.execute_command(*command)


def test_a_connection_without_a_password_is_refused(socket: Path) -> None:
    with (
        redis.Redis(unix_socket_path=str(socket), protocol=2, retry=Retry(NoBackoff(), 0)) as anonymous,
        pytest.raises(redis.exceptions.RedisError, match=r"[Aa]uthentication|NOAUTH"),
    ):
        anonymous.get(KEYS.live)


def test_the_file_as_it_stands_in_the_repository_starts_no_server(tmp_path: Path) -> None:
    with GuardedCommand([find_server(), CONF, "--port", "0"], log_path=tmp_path / "log") as process:
        assert poll_until(lambda: not process.is_running)

        assert process.returncode != 0


def test_the_embedded_server_and_the_file_agree(loader: redis.Redis) -> None:
    for name in ("save", "appendonly", "maxmemory-policy", "protected-mode"):
        assert loader.config_get(name) == {name: SERVER_SETTINGS[name]}


def test_the_check_names_the_rights_that_a_user_lacks(socket: Path, loader: redis.Redis) -> None:
    def redis_line(user: str, namespace: str = "default") -> tuple[str, str]:
        url = f"unix://{user}@{socket}"
        return check_redis(NightConfig(namespace=namespace, redis_url=url))

    assert redis_line("larder-loader:loads")[0] == "ok"
    assert not loader.exists(KEYS.page("check", "check", 0), f"{KEYS.generations}:check")

    state, words = redis_line("larder-loader:loads", "other")
    assert state == "to do" and "refuses GET, HGETALL, " in words and ", HDEL to its user" in words
    assert "ACL SETUSER larder-loader ~larder:1:{other}:* ~larder:1:other:g:* +get " in words

    state, words = redis_line("larder-reader:reads")
    assert state == "ok" and "can serve but not load" in words and "UNLINK" in words

    state, words = redis_line("larder-loader:wrong")
    assert state == "to do" and "password" in words
