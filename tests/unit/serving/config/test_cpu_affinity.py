"""Which cores the model's threads stay on."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache.config.serving import parse_cores
from cache.errors import ConfigError
from serving.config.settings import ServingConfig
from serving.process.resources import check_cores, place_thread

needs_pinning = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")


@pytest.mark.parametrize(("text", "cores"), [("", ()), ("3", (3,)), ("0-2, 8", (0, 1, 2, 8)), ("2,1,2", (1, 2))])
def test_cores_are_a_list_with_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["a", "-1", "1-", "1-2-3", "0x1"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="live_cores"):
        ServingConfig(live_cores=text)


@needs_pinning
def test_a_core_that_is_not_available_is_refused() -> None:
    with pytest.raises(ConfigError, match="live_cores names"):
        check_cores((100_000,))


@needs_pinning
def test_a_worker_stays_on_its_cores_and_no_other_thread_does() -> None:
    process_cores = os.sched_getaffinity(0)
    core = min(process_cores)
    with ThreadPoolExecutor(1, initializer=place_thread, initargs=((core,), 0)) as pool:
        assert pool.submit(os.sched_getaffinity, 0).result() == {core}
    assert os.sched_getaffinity(0) == process_cores


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
@pytest.mark.parametrize("nice", [0, 10, 19])
def test_a_worker_lets_others_go_first_and_no_other_thread_does(nice: int) -> None:
    process_nice = os.getpriority(os.PRIO_PROCESS, 0)

    def get_thread_nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1, initializer=place_thread, initargs=((), nice)) as pool:
        assert pool.submit(get_thread_nice).result() == (nice or process_nice)
    assert get_thread_nice() == process_nice


@pytest.mark.parametrize("nice", [-1, 20])
def test_any_other_place_in_line_is_refused(nice: int) -> None:
    with pytest.raises(ConfigError, match="live_nice"):
        ServingConfig(live_nice=nice)
