"""Replacement of what code takes from its process: clocks, sleeps, random numbers, threads.

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
    """Protocol of the parts of a process that code uses."""

    def monotonic(self) -> float:
        """Return seconds since some moment."""

    def wall(self) -> float:
        """Return Unix seconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def rng(self) -> random.Random:
        """Return random numbers."""

    def pool(self, workers: int, *_name: Any, **_options: Any) -> Any:
        """Return a thread pool."""

    def lock(self) -> Any:
        """Return a lock."""


PACKAGES = (
    "cache", "serving", "precompute.releases", "cache.control", "precompute.traffic.experiments", "redis",
)  # fmt: skip
"""Packages whose modules are looked at, with all that is below them."""

LEFT_OUT = ("serving.client", "serving.cli.lookup", "serving.explain.cli", "serving.dashboard", "cache.topk._topk")
"""Programs and libraries for callers, which need extras of their own, and a library that is no module."""


class Stand(ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({**vars(real), **names})


def import_all() -> None:
    """Import all modules to be replaced in: one that is imported later would keep its own clock."""
    for name in PACKAGES:
        if name == "redis":
            continue
        package = importlib.import_module(name)
        for module_info in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            if not module_info.name.startswith(LEFT_OUT) and not module_info.name.endswith("__main__"):
                importlib.import_module(module_info.name)


@contextmanager
def substituted(replaced: Mapping[Any, Any]) -> Iterator[None]:
    """Within the block, each key (a module or a function) is replaced by its value in all the packages."""
    undo: list[Callable[[], None]] = []
    by_id = {id(real): replacement for real, replacement in replaced.items()}
    try:
        for name, module in sorted(sys.modules.items()):
            if module is not None and name.split(".")[0] in _ROOTS and _is_of(name):
                _in_module(module, by_id, undo)
        yield
    finally:
        for undo_change in reversed(undo):
            undo_change()


def forget() -> None:
    """Empties the caches of the packages' functions: what a process remembers takes fewer lines to find.

    Those without arguments are filled instead; they cost too much to fill each time.
    """
    for cached_function in _remembering():
        if inspect.signature(cached_function.__wrapped__).parameters:
            cached_function.cache_clear()
        else:
            cached_function()


@functools.cache
def _remembering() -> tuple[Any, ...]:
    modules = [module for name, module in sorted(sys.modules.items()) if module and _is_of(name)]
    module_values = (module_value for module in modules for module_value in vars(module).values())
    return tuple(
        module_value for module_value in module_values if isinstance(module_value, functools._lru_cache_wrapper)
    )


_ROOTS = {name.split(".")[0] for name in PACKAGES}


def _is_of(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in PACKAGES)


def _in_module(module: ModuleType, by_id: Mapping[int, Any], undo: list[Callable[[], None]]) -> None:
    for name, value in list(vars(module).items()):
        if id(value) in by_id:
            setattr(module, name, by_id[id(value)])
            undo.append(lambda name=name, value=value: setattr(module, name, value))  # type: ignore[misc]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for member in list(vars(value).values()):
                _in_function(getattr(member, "__func__", member), by_id, undo)
        else:
            _in_function(value, by_id, undo)


def _in_function(function: Any, by_id: Mapping[int, Any], undo: list[Callable[[], None]]) -> None:
    if not isinstance(function, FunctionType):
        return
    if any(id(default) in by_id for default in function.__defaults__ or ()):
        original_defaults = function.__defaults__
        function.__defaults__ = tuple(by_id.get(id(default), default) for default in original_defaults or ())
        undo.append(lambda: setattr(function, "__defaults__", original_defaults))
    if any(id(default) in by_id for default in (function.__kwdefaults__ or {}).values()):
        original_keyword_defaults = dict(function.__kwdefaults__ or {})
        function.__kwdefaults__ = {
            name: by_id.get(id(default), default) for name, default in original_keyword_defaults.items()
        }
        undo.append(lambda: setattr(function, "__kwdefaults__", original_keyword_defaults))


def replacements(process: Process) -> dict[Any, Any]:
    """Return the replacements of clocks, sleeps, random numbers, threads and locks of a process."""

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
        **{getattr(time, name): replacement for name, replacement in clocks.items()},
        random: Stand(random, random=drawn, Random=seeded),
        random.random: drawn,
        secrets: Stand(secrets, token_hex=token_hex),
        secrets.token_hex: token_hex,
        ThreadPoolExecutor: process.pool,
        threading: Stand(threading, Lock=process.lock),
        threading.Lock: process.lock,
        get_lib_version: lambda: "0",  # redis-py reads files for it, at every connection
    }
