"""Traced calls of the running program between our modules.

A *hop* is a call from one of our modules into another one that goes on from there into a third, or out to Redis. A
call that comes straight back (a hash, a field that is read) is a *leaf*: it stands beside the hop that makes it, since
nobody has to follow it to understand where the work goes. Packages that only observe (metrics, tracing, usage) are
looked through. What is called once more from the same place (for each of 100 entities) counts once. `cache.l2`, the
client of Redis, counts as one module: what happens in it is shared by all who ask in one turn.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OWN_PACKAGES = ("cache", "serving", "precompute", "dags")
AS_ONE = "cache.l2"
OBSERVERS = (
    "serving.metrics", "serving.tracing", "serving.usage", "serving.engine.answer_observer",
)  # fmt: skip


@dataclass(eq=False)
class Call:
    """A call of one of our functions, and the calls that it made."""

    module: str
    function: str
    calls: list["Call"] = field(default_factory=list)

    @property
    def counted_module(self) -> str:
        """The module under which the call is counted."""
        return AS_ONE if self.module.startswith(f"{AS_ONE}.") else self.module

    @property
    def observes(self) -> bool:
        """Whether the called package only counts, logs or passes on."""
        return self.module.startswith(OBSERVERS)

    @property
    def goes_on(self) -> bool:
        """Whether the call reaches other modules of ours, at any depth."""
        return any(call.goes_on or not (call.observes or call.module == self.module) for call in self.calls)


@dataclass(frozen=True)
class Hop:
    """A call into another module that calls on; `leaves` are modules whose functions return at once."""

    module: str
    function: str
    leaves: tuple[str, ...]


class Recorder:
    """Records calls of our code while `recording`, in one thread and in threads that it starts meanwhile."""

    def __init__(self) -> None:
        self.roots: list[Call] = []
        self._names: dict[CodeType, str | None] = {}
        self._frames: dict[FrameType, Call] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the end of the block."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._frames.clear()

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        # A coroutine that resumes is another event with the same frame.
        if event != "call" or frame in self._frames or (name := self._name(frame.f_code)) is None:
            return
        call = self._frames[frame] = Call(name, frame.f_code.co_qualname.replace(".<locals>", ""))
        above = frame.f_back
        while above is not None and above not in self._frames:
            above = above.f_back
        (self.roots if above is None else self._frames[above].calls).append(call)

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            self._names[code] = self._named(code)
        return self._names[code]

    def _named(self, code: CodeType) -> str | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in OWN_PACKAGES:
            return None
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def hops(roots: Sequence[Call], home: str = "") -> list[Hop]:
    """Return the hops below a call in their order; `home` is the module where it begins."""
    leaves_by_hop: dict[tuple[str, str, str], list[str]] = {}

    def follow(call: Call, above: str, at: list[str]) -> None:
        current_module = call.counted_module
        if call.observes:
            current_module = above
        elif current_module != above:
            if not call.goes_on:
                if current_module not in at:
                    at.append(current_module)
                return
            at = leaves_by_hop.setdefault((above, current_module, call.function), [])
        for inner_call in call.calls:
            follow(inner_call, current_module, at)

    for root in roots:
        follow(root, home, [])
    return [Hop(module, function, tuple(at)) for (_, module, function), at in leaves_by_hop.items()]


def modules(walk: Sequence[Hop]) -> list[str]:
    """Return the modules in the order in which they are first called."""
    return list(dict.fromkeys(hop.module for hop in walk))


def calls_of(roots: Sequence[Call], is_meant: Callable[[Call], bool]) -> int:
    """Return how many calls below a call, at any depth, satisfy a condition."""
    return sum(is_meant(call) + calls_of(call.calls, is_meant) for call in roots)


def table(walk: Sequence[Hop], *, leaves: bool = False) -> str:
    """Return the hops as a Markdown table; with `leaves`, also modules whose functions return at once."""
    lines = ["| hop | module | function |", "|---|---|---|"]
    if leaves:
        lines = ["| hop | module | function | calls on the way |", "|---|---|---|---|"]
    for number, hop in enumerate(walk, 1):
        on_the_way = ", ".join(f"`{leaf}`" for leaf in hop.leaves)
        more = f" {on_the_way} |" if leaves else ""
        lines.append(f"| {number} | `{hop.module}` | `{hop.function}` |{more}")
    return "\n".join(lines)
