"""What code takes from its process, taken from the simulation instead: clocks, sleeps, chance, threads.

Found by what it is, not by where it stands: every module of the named packages that has `time`, `random`, `secrets`
or `threading`, and every default argument that is one of their functions.
"""

import functools
import importlib
import inspect
import pkgutil
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Protocol

from redis.utils import get_lib_version


class Process(Protocol):
    """Protocol of what a process is to its code."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def wall(self) -> float:
        """Unix seconds."""

    def sleep(self, seconds: float) -> None:
        """Waits."""

    def rng(self) -> random.Random:
        """Chance."""

    def pool(self, workers: int, *_name: Any, **_options: Any) -> Any:
        """A thread pool."""

    def lock(self) -> Any:
        """A lock."""


PACKAGES = (
    "cache", "serving", "precompute.releases", "precompute.control", "precompute.experiments.changes", "redis",
)  # fmt: skip
"""Packages whose modules are looked at, with all that is below them."""

LEFT_OUT = (
    "serving.client",
    "serving.explain.asking",
    "serving.explain.cli",
    "serving.dashboard.terminal",
    "cache.topk._topk",
)
"""Programs and libraries for callers, which need extras of their own, and a library that is no module."""


class Stand(ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({**vars(real), **names})


def import_all() -> None:
    """Imports what is to be looked at: a module that came later would keep its own clock."""
    for name in PACKAGES:
        if name == "redis":
            continue
        package = importlib.import_module(name)
        for each in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            if not each.name.startswith(LEFT_OUT) and not each.name.endswith("__main__"):
                importlib.import_module(each.name)


@contextmanager
def substituted(replaced: Mapping[Any, Any]) -> Iterator[None]:
    """While it lasts, each key (a module or a function) is its value, wherever the packages have it."""
    undo: list[Callable[[], None]] = []
    by_id = {id(real): other for real, other in replaced.items()}
    try:
        for name, module in sorted(sys.modules.items()):
            if module is not None and name.split(".")[0] in _ROOTS and _is_of(name):
                _in_module(module, by_id, undo)
        yield
    finally:
        for each in reversed(undo):
            each()


def forget() -> None:
    """Empties the caches of the packages' functions: what a process remembers takes fewer lines to find.

    Those without arguments are filled instead; they cost too much to fill each time.
    """
    for each in _remembering():
        if inspect.signature(each.__wrapped__).parameters:
            each.cache_clear()
        else:
            each()


@functools.cache
def _remembering() -> tuple[Any, ...]:
    modules = [module for name, module in sorted(sys.modules.items()) if module and _is_of(name)]
    found = (each for module in modules for each in vars(module).values())
    return tuple(each for each in found if isinstance(each, functools._lru_cache_wrapper))


_ROOTS = {name.split(".")[0] for name in PACKAGES}


def _is_of(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in PACKAGES)


def _in_module(
    module: ModuleType, by_id: Mapping[int, Any], undo: list[Callable[[], None]]
) -> None:
    for name, value in list(vars(module).items()):
        if id(value) in by_id:
            setattr(module, name, by_id[id(value)])
            undo.append(lambda name=name, value=value: setattr(module, name, value))  # type: ignore[misc]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for each in list(vars(value).values()):
                _in_function(getattr(each, "__func__", each), by_id, undo)
        else:
            _in_function(value, by_id, undo)


def _in_function(found: Any, by_id: Mapping[int, Any], undo: list[Callable[[], None]]) -> None:
    if not isinstance(found, FunctionType):
        return
    if any(id(each) in by_id for each in found.__defaults__ or ()):
        before = found.__defaults__
        found.__defaults__ = tuple(by_id.get(id(each), each) for each in before or ())
        undo.append(lambda: setattr(found, "__defaults__", before))
    if any(id(each) in by_id for each in (found.__kwdefaults__ or {}).values()):
        kept = dict(found.__kwdefaults__ or {})
        found.__kwdefaults__ = {name: by_id.get(id(each), each) for name, each in kept.items()}
        undo.append(lambda: setattr(found, "__kwdefaults__", kept))


def replacements(process: Process) -> dict[Any, Any]:
    """What stands for clocks, sleeps, chance, threads and locks of a process."""

    def seeded(seed: Any = None) -> random.Random:
        return random.Random(process.rng().getrandbits(64) if seed is None else seed)

    def token_hex(count: int = 32) -> str:
        return process.rng().randbytes(count).hex()

    def drawn() -> float:
        return process.rng().random()

    clocks = {
        "monotonic": process.monotonic, "time": process.wall, "sleep": process.sleep,
        "perf_counter": process.monotonic,
    }  # fmt: skip
    return {
        time: Stand(time, **clocks),
        **{getattr(time, name): other for name, other in clocks.items()},
        random: Stand(random, random=drawn, Random=seeded),
        random.random: drawn,
        secrets: Stand(secrets, token_hex=token_hex),
        secrets.token_hex: token_hex,
        ThreadPoolExecutor: process.pool,
        threading: Stand(threading, Lock=process.lock),
        threading.Lock: process.lock,
        get_lib_version: lambda: "0",  # redis-py reads files for it, at every connection
    }
