"""Overlapping stages of a stream: each runs in its own threads, a bounded number of values ahead of the next stage."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


def _apply_to_popped(function: Callable[[Value], Result], values: list[Value]) -> list[Result]:
    """Apply the function to the list's single value, popped so that it can be freed; return the result in a list."""
    return [function(values.pop())]


class StreamStages:
    """Threads of one stream; leaving the `with` block stops and joins them.

    A stage that is busy with a value finishes that value first. An exception in a stage reaches the later stages, and
    finally the consumer, once the values before it have been consumed.
    """

    def __init__(self) -> None:
        self._threads_and_sources: list[tuple[ThreadPoolExecutor, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread, _values in self._threads_and_sources:
            thread.shutdown(wait=False, cancel_futures=True)
        for thread, values in self._threads_and_sources:
            thread.shutdown(cancel_futures=True)
            if hasattr(values, "close"):
                values.close()

    def run_ahead(self, values: Iterable[Value], *, values_ahead_max: int = 1) -> Iterator[Value]:
        """Yield `values`, computed in a thread that is at most `values_ahead_max` finished values ahead."""
        thread, remaining_values = ThreadPoolExecutor(1), iter(values)
        self._threads_and_sources.append((thread, values))
        # `values_ahead_max` finished values, and one being computed.
        futures = deque(thread.submit(self._take_next, remaining_values) for _ in range(values_ahead_max + 1))
        return self._yield_results(thread, remaining_values, futures)

    def map_values(
        self, function: Callable[[Value], Result], values: Iterable[Value], *, thread_count: int
    ) -> Iterator[Result]:
        """Yield `function` of each value, in their order, computed by `thread_count` threads.

        Besides the result in use, at most `thread_count` results are waiting or being computed.
        """
        if thread_count == 1:
            return self.run_ahead(map(function, values))
        pool = ThreadPoolExecutor(thread_count)

        def results() -> Iterator[Future[list[Result]]]:
            for value in values:
                future = pool.submit(_apply_to_popped, function, [value])
                del value  # no reference remains here, so the value can be freed
                yield future
                del future

        futures = self.run_ahead(results(), values_ahead_max=thread_count - 1)
        self._threads_and_sources.append((pool, None))  # listed, and so stopped, after the thread that submits to it
        return (future.result().pop() for future in futures)

    @staticmethod
    def _take_next(remaining_values: Iterator[Value]) -> list[Value]:
        """Return the next value in a list, or an empty list at the end."""
        for value in remaining_values:
            return [value]
        return []

    def _yield_results(
        self, thread: ThreadPoolExecutor, remaining_values: Iterator[Value], futures: "deque[Future[list[Value]]]"
    ) -> Iterator[Value]:
        while next_values := futures.popleft().result():
            futures.append(thread.submit(self._take_next, remaining_values))
            yield next_values.pop()  # popped: no reference remains here, so the value can be freed
