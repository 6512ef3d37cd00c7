"""Rights of infra/redis.conf that events need: the service's, and those of producers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cache.format.redis_keys import Keyspace
from cache.process.child_process import Guarded
from cache.process.redis_server import find_server
from serving.events import inbox as inbox_module
from serving.events.inbox import GROUP
from tests.integration.events.intakes import event, intake
from tests.integration.releases.test_acl import answering, client, configured
from tests.integration.serving_app import eventually
from tests.polling import until

KEYS = Keyspace("default")
PRODUCER = "user larder-producer off"


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server with our configuration, and a producer let in."""
    folder = tmp_path_factory.mktemp("events-acl")
    text = configured("reads", "loads")
    assert text.count(PRODUCER) == 1
    (folder / "redis.conf").write_text(text.replace(PRODUCER, "user larder-producer on >produces"))
    path = folder / "redis.sock"
    command: list[str | Path] = [
        find_server(),
        folder / "redis.conf",
        "--port",
        "0",
        "--unixsocket",
        path,
    ]
    with Guarded(command, log=folder / "log") as process:
        assert until(lambda: answering(path)), process.tail()
        yield path


async def test_the_service_takes_events_in_with_the_readers_rights(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CLAIM_EVERY_S", 0.05), ("CLAIM_AFTER_MS", 1), ("FORGET_AFTER_MS", 0)):
        monkeypatch.setattr(inbox_module, name, value)
    url = f"unix://larder-reader:reads@{socket}"
    with client(socket, "larder-producer", "produces") as producer:
        producer.xadd(KEYS.inbox, {"user": "u", "item": "i", "id": "1"})
        producer.xadd(KEYS.inbox, {"user": "u"})
    with client(socket, "larder-loader", "loads") as loader:
        async with intake(url, KEYS, inbox=True) as one:
            told = await one.take(event(1), event(1), {"id": "x"})
            await one.parts.intake.rejections.flush()
            assert (told["accepted"], told["repeated"], told["durability"]) == (1, 1, "none")

            async def taken() -> bool:
                return one.results["accepted"] == 2 and one.results["missing_field"] == 2

            assert await eventually(taken)
            await one.parts.intake.counts.look()
            (up,) = [
                sample.value
                for family in one.parts.intake.counts.collect()
                for sample in family.samples
                if sample.name == "larder_events_up"
            ]
            assert up == 1
        assert loader.exists(KEYS.events, KEYS.inbox, KEYS.rejected_events) == 3


@pytest.mark.parametrize(
    "command",
    [
        ("XADD", KEYS.events, "*", "e", "{}"),
        ("XADD", "larder:1:{other}:events:inbox", "*", "e", "{}"),
        ("XLEN", KEYS.inbox),
        ("XRANGE", KEYS.inbox, "-", "+"),
        ("XREADGROUP", "GROUP", GROUP, "x", "STREAMS", KEYS.inbox, ">"),
        ("DEL", KEYS.inbox),
        ("GET", KEYS.live),
        ("EVAL", "return 1", "0"),
        ("CONFIG", "GET", "appendonly"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_producer_may_write_into_the_inbox_and_nothing_else(
    socket: Path, command: tuple[str, ...]
) -> None:
    with (
        client(socket, "larder-producer", "produces") as producer,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
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
def test_the_service_can_neither_trim_remove_nor_overwrite_events(
    socket: Path, command: tuple[str, ...]
) -> None:
    with (
        client(socket, "larder-reader", "reads") as reader,
        pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|can't access"),
    ):
        reader.execute_command(*command)
