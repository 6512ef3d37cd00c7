"""Stages of a stream that overlap: each runs in a thread of its own, a bounded number of values ahead of the next."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

Value = TypeVar("Value")


class _Stopped(Exception):
    """Raised in a stage whose values nobody wants any more."""


@dataclass(slots=True)
class _Line(Generic[Value]):
    """Queue between two stages: what waits, whether more comes, and what went wrong."""

    values: deque[Value] = field(default_factory=deque)
    has_ended: bool = False
    error: BaseException | None = None


class Stages:
    """Threads of one stream; leaving the block stops them, whatever they wait for, and joins them.

    A stage that is busy with a value finishes that value first. What a stage raises reaches the stages after it, and in
    the end whoever iterates, when the values before it have been taken.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_stopped = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def ahead(self, values: Iterable[Value], *, depth: int = 1) -> Iterator[Value]:
        """Yields `values`, computed in a thread that is at most `depth` finished values ahead."""
        line: _Line[Value] = _Line()
        thread = threading.Thread(target=self._fill, args=(line, values, depth), daemon=True)
        thread.start()
        self._threads.append(thread)
        return self._drain(line)

    def _fill(self, line: _Line[Value], values: Iterable[Value], depth: int) -> None:
        error: BaseException | None = None
        try:
            for value in values:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopped or len(line.values) < depth)
                    if self._is_stopped:
                        break
                    line.values.append(value)
                    del value  # else it would live beside the next
                    self._changed.notify_all()
        except _Stopped:
            pass
        except BaseException as raised:
            error = raised
        finally:
            _close(values)
            with self._changed:
                line.error, line.has_ended = error, True
                self._changed.notify_all()

    def _drain(self, line: _Line[Value]) -> Iterator[Value]:
        while self._await(line):
            yield self._take(line)  # kept by nobody here, however long it is used

    def _await(self, line: _Line[Value]) -> bool:
        """Waits for another value, True if one has come; raises what ended the stage, if it was an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or line.values or line.has_ended)
            if self._is_stopped:
                raise _Stopped
            if not line.values and line.error is not None:
                raise line.error
            return bool(line.values)

    def _take(self, line: _Line[Value]) -> Value:
        with self._changed:
            self._changed.notify_all()
            return line.values.popleft()


def _close(values: Any) -> None:
    close = getattr(values, "close", None)
    if close is not None:
        close()
