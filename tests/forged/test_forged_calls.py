"""What asks Redis, called by itself under every malformed reply: it passes, or ends with an error that names the thing.

A night takes seconds to try one order, a call a millisecond: so these see orders that nights have no time for.
"""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import LarderError
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import open_client
from cache.store.releases import Pointer
from cache.usage.hot_keys import COLD_WINDOW, window_number_of
from infra.cli.check import inspect_redis
from precompute.bulk import readback, watch
from precompute.bulk.headroom import unevictable_bytes
from precompute.bulk.load import mark_loaded
from precompute.events import stream
from precompute.gates.rules.headroom import memory_limit
from precompute.releases.replication import run_ids
from precompute.releases.staging import StagingNote
from precompute.usage import worklist
from tests.forged.malformations import MALFORMATIONS
from tests.forged.proxy import ForgingProxy, Order, forging

KEYS = Keyspace("forged-calls")
POINTER = Pointer("20260101T000000Z-000000000001", 1, None, "test", 0.0)
ROWS = {POINTER.generation: RegistryRow(GenerationState.VERIFIED, 0.0)}
PAGES = [b"forged-calls:page", b"forged-calls:absent"]
NAMED = (LarderError, redis.RedisError, OSError)
"""Errors that say what is wrong."""
SLOW = {
    "silence", "half of it, and silence", "nothing but a push", "a line without an end", "a size that is one too large",
    "many bytes too many",
}  # fmt: skip
"""Malformations after which a client waits until its time is over; nights and services try them."""


def stage(control: Control) -> None:
    note = StagingNote(control)
    note.set(POINTER.generation, "test")
    note.get()
    note.clear("test")


def figures(control: Control) -> None:
    info = watch.fetch_info(control.client)
    watch.redis_lag_bytes(info)
    watch.count_reads(info)
    watch.main_thread_cpu_s(info)


def mark_part(control: Control) -> None:
    part: Any = SimpleNamespace(loaded_field="a/0", loaded_digest=b"mark", progress_field="a/0:progress")
    mark_loaded(control.client, KEYS.loaded_parts(POINTER.generation), part)


CALLS: dict[str, Callable[[Control], Any]] = {
    "pointer": Control.read_pointer,
    "rows": Control.rows,
    "time": Control.time,
    "replicas": Control.replicas,
    "silent replicas": Control.count_silent_replicas,
    "policy": Control.check_eviction_policy,
    "mark": lambda control: control.write_rows(ROWS, expected_epoch=1),
    "move": lambda control: control.move_pointer(POINTER, expected_epoch=1, row_by_generation=ROWS),
    "staging note": stage,
    "run ids": lambda control: run_ids(control.client),
    "figures": figures,
    "memory": lambda control: unevictable_bytes(control, control.client, pages_bytes=1, record_bytes=1),
    "limit": lambda control: memory_limit(control.client),
    "sizes": lambda control: readback.value_sizes(control.client, PAGES),
    "entries": lambda control: stream.read_entries(control.client, KEYS.events),
    "newest entry": lambda control: stream.read_newest_id(control.client, KEYS.events),
    "worklist": worklist.read_cold_counts,
    "kind of server": lambda control: inspect_redis(control.client),
    "mark of a part": mark_part,
}


@pytest.fixture
def proxy(redis_url: str) -> Iterator[ForgingProxy]:
    with redis.Redis.from_url(redis_url) as true, forging(redis_url) as forging_proxy:
        true.set(KEYS.live, POINTER.to_bytes())
        true.hset(KEYS.generations, mapping={name: row.to_bytes() for name, row in ROWS.items()})
        true.set(PAGES[0], bytes(100))
        true.xadd(KEYS.events, {"e": "{}"})
        true.zadd(KEYS.cold_names(window_number_of(time.time(), COLD_WINDOW)), {b"user_topk:u": 2.0})
        true.zadd(KEYS.replicas, {b'{"replica":"r","holds":[]}': time.time()})
        yield forging_proxy
        true.delete(
            KEYS.loaded_parts(POINTER.generation), KEYS.live, KEYS.generations, KEYS.events, KEYS.replicas, PAGES[0]
        )


@pytest.mark.parametrize("call", CALLS)
def test_a_call_names_what_is_wrong_with_a_malformed_reply(proxy: ForgingProxy, call: str) -> None:
    settings: Any = {"protocol": 3, "socket_timeout": 0.5, "retry": Retry(NoBackoff(), 0)}
    control = Control(open_client(f"redis://127.0.0.1:{proxy.port}/0", **settings), KEYS)
    CALLS[call](control)
    orders = [
        Order(command, malformation) for command in dict(proxy.replies) for malformation in MALFORMATIONS.keys() - SLOW
    ]
    wordless = {}
    for order in orders:
        proxy.forge(order)
        if order.command.startswith(("HELLO", "CLIENT", "SELECT")):
            control.client.connection_pool.disconnect()
        try:
            CALLS[call](control)
        except NAMED:
            pass
        except Exception as error:
            wordless[order] = error
    proxy.forge(None)
    CALLS[call](control)  # no reply of theirs is left over
    control.client.close()
    assert wordless == {}, f"{len(wordless)} of {len(orders)}"
