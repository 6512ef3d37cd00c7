"""One library's protection against stampedes over Redis, in an environment of its own: they need older redis-py.

`python stampede_peers.py LIBRARY REDIS_URL KEYS WAITERS` prints loads, errors and seconds as JSON, or why there are
none. The loader waits 5 ms and returns 616 bytes, in place of an inference.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

LOAD_S = 0.005
VALUE = b"\xa5" * 616
TTL_S = 60

Loader = Callable[[str], Awaitable[bytes]]
Get = Callable[[str], Awaitable[Any]]


async def cashews(url: str, load: Loader) -> Get:
    """Run cashews' plain decorator, which joins callers within a process."""
    cache = import_module("cashews").Cache()
    cache.setup(url)
    get: Get = cache(ttl=TTL_S, key="cashews:{name}")(_named(load))
    return get


async def cashews_lock(url: str, load: Loader) -> Get:
    """Run cashews with its lock in Redis."""
    cache = import_module("cashews").Cache()
    cache.setup(url)
    get: Get = cache(ttl=TTL_S, key="cashews-lock:{name}", lock=True)(_named(load))
    return get


def _named(load: Loader) -> Loader:
    async def named(name: str) -> bytes:
        return await load(name)

    return named


async def aiocache(url: str, load: Loader) -> Get:
    """Run aiocache's `cached_stampede`, a lease in Redis."""
    module = import_module("aiocache")
    where = urlsplit(url)
    get: Get = module.cached_stampede(
        lease=2, ttl=TTL_S, cache=module.Cache.REDIS, endpoint=where.hostname, port=where.port,
        namespace="aiocache", key_builder=lambda _function, name: name,
        serializer=import_module("aiocache.serializers").PickleSerializer(),
    )(load)  # fmt: skip
    return get


async def cacheme(url: str, load: Loader) -> Get:
    """Run a cacheme node over its Redis storage, where callers of one process join."""
    module = import_module("cacheme")
    pickled = import_module("cacheme.serializer").PickleSerializer()
    await module.register_storage("redis", module.Storage(url=url))

    @dataclass
    class Item(module.Node):  # type: ignore[misc,name-defined]
        name: str

        def key(self) -> str:
            return self.name

        async def load(self) -> bytes:
            return await load(self.name)

        class Meta(module.Node.Meta):  # type: ignore[misc,name-defined]
            version = "v1"
            caches = [module.Cache(storage="redis", ttl=timedelta(seconds=TTL_S))]  # noqa: RUF012
            serializer = pickled

    async def get(name: str) -> Any:
        return await module.get(Item(name))

    return get


LIBRARIES = {
    "cashews": cashews, "cashews_lock": cashews_lock, "aiocache": aiocache, "cacheme": cacheme
}  # fmt: skip


async def stampede(library: str, url: str, keys: int, waiters: int) -> dict[str, Any]:
    """Start all waiters of all keys at once."""
    loads = 0

    async def load(name: str) -> bytes:
        nonlocal loads
        loads += 1
        await asyncio.sleep(LOAD_S)
        return VALUE

    get = await LIBRARIES[library](url, load)
    await get("warm")
    loads = 0
    names = [f"{time.time_ns()}-{number}" for number in range(keys)]
    started_at, cpu = time.perf_counter(), time.process_time()
    outcomes = await asyncio.gather(*(get(name) for name in names * waiters), return_exceptions=True)
    return {
        "version": version(library.partition("_")[0]),
        "loads": loads,
        "errors": sum(outcome != VALUE for outcome in outcomes),
        "seconds": round(time.perf_counter() - started_at, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def main() -> None:
    """Run one and say how it went."""
    library, url, keys, waiters = sys.argv[1:]
    try:
        print(json.dumps(asyncio.run(stampede(library, url, int(keys), int(waiters)))))
    except ImportError as error:
        print(json.dumps({"absent": str(error)}))


if __name__ == "__main__":
    main()
