"""Object stores in memory with the worst behaviour of real ones, and one that counts its requests."""

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from cache.store.artefacts import ArtefactStore


class Memory(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory with a protocol of its own."""

    protocol: ClassVar[str]
    cachable = False
    _writing: ClassVar[threading.Lock] = threading.Lock()
    """Held while an object is written: a server looks whether one exists and writes it in one step."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://", 1)))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> Any:
        with self._writing:
            if mode == "create" and self._strip_protocol(path) in self.store:
                raise FileExistsError(path)
            return super().pipe_file(path, value, **more)


class Counting(Memory):
    """Counts requests by kind; reading many files at once is one read each, as an object store bills it."""

    protocol = "counting"
    request_counts: ClassVar[Counter[str]] = Counter()
    log: ClassVar[list[tuple[str, str]]] = []

    def _count(self, kind: str, path: str) -> None:
        self.request_counts[kind] += 1
        self.log.append((kind, self._strip_protocol(path)))

    def cat_file(self, path: str, *arguments: Any, **more: Any) -> Any:
        self._count("get", path)
        return super().cat_file(path, *arguments, **more)

    def cat(self, path: Any, *arguments: Any, **more: Any) -> Any:
        self.request_counts["rounds"] += 1
        return super().cat(path, *arguments, **more)

    def pipe_file(self, path: str, *arguments: Any, **more: Any) -> Any:
        self._count("put", path)
        return super().pipe_file(path, *arguments, **more)

    def ls(self, path: str, *arguments: Any, **more: Any) -> Any:
        self._count("list", path)
        return super().ls(path, *arguments, **more)


class Overwriting(Memory):
    """Ignores that an object must not exist, like a server without If-None-Match."""

    protocol = "overwriting"

    def pipe_file(self, path: str, value: bytes, mode: str = "", **_more: Any) -> Any:
        return super().pipe_file(path, value)


class PreconditionFailed(Exception):
    """An error of a driver's own kind, not an OSError."""


class Odd(Memory):
    """Refuses correctly, but by exceptions of its own, with secrets in their texts."""

    protocol = "odd"
    fails: ClassVar[Exception | None] = None

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> Any:
        self._fail()
        if mode == "create" and self._strip_protocol(path) in self.store:
            raise PreconditionFailed("412: At least one of the pre-conditions did not hold")
        return super().pipe_file(path, value, mode=mode, **more)

    def cat_file(self, *arguments: Any, **more: Any) -> Any:
        self._fail()
        return super().cat_file(*arguments, **more)

    def ls(self, *arguments: Any, **more: Any) -> Any:
        self._fail()
        return super().ls(*arguments, **more)

    def get_file(self, *arguments: Any, **more: Any) -> Any:
        self._fail()
        return super().get_file(*arguments, **more)

    def put_file(self, *arguments: Any, **more: Any) -> Any:
        self._fail()
        return super().put_file(*arguments, **more)

    def rm(self, *arguments: Any, **more: Any) -> Any:
        self._fail()
        return super().rm(*arguments, **more)


class Forgetful(Memory):
    """Reports that an object was created although another one is there: a lost race with last-write-wins."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> Any:
        super().pipe_file(path, value, mode=mode, **more)
        if "/releases/" in path:
            super().pipe_file(path, b"another's")


class Stale(Memory):
    """Answers `exists` and `info` from an old listing until it is told to discard it."""

    protocol = "stale"
    listed_paths: ClassVar[set[str]] = set()

    def exists(self, path: str, **_more: Any) -> bool:
        return self._strip_protocol(path) in self.listed_paths


for filesystem_class in (Counting, Overwriting, Odd, Forgetful, Stale):
    fsspec.register_implementation(filesystem_class.protocol, filesystem_class, clobber=True)


def store_of(kind: type[Memory], host_cache: Any, *, url: str = "") -> ArtefactStore:
    """Return an artefact store of that kind; a new one unless named."""
    return ArtefactStore(url or f"{kind.protocol}://larder-{uuid.uuid4().hex}", host_cache)


@contextlib.contextmanager
def failing(error: Exception) -> Iterator[None]:
    """Within the block, every request to an `Odd` store raises this."""
    Odd.fails = error
    try:
        yield
    finally:
        Odd.fails = None


@contextlib.contextmanager
def requests() -> Iterator[Counter[str]]:
    """Count requests to a `Counting` store in the block: get, put, list, and rounds of parallel reads."""
    assert threading.current_thread() is threading.main_thread()
    Counting.request_counts.clear()
    Counting.log.clear()
    yield Counting.request_counts
