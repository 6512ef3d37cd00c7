"""Scatter-gather of one caller's commands over the nodes that hold their keys: the answers are put together again."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from redis.crc import key_slot

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.cluster.nodes import Nodes
from cache.l2.commands import (
    AskingCommand,
    Command,
    L2Result,
    OverlayRead,
    OverlayWrite,
    PageRead,
    PageReads,
)
from cache.l2.errors import Redirected
from cache.l2.replies import Frames
from cache.l2.slots import PageSlots
from cache.l2.tier import Keep, PipelinePart, RemoteTier

log = logging.getLogger(__name__)

REDIRECTS_MAX: Final = 3
"""Times that a command is sent on: from a stale map to the old owner, from there to the new one, once more for luck."""

_RUNS_MAX: Final = 16


class Slots:
    """The slot of every command's key; a table's pages are remembered."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self._pages: dict[tuple[str, str], PageSlots] = {}

    def of(self, commands: Sequence[Command]) -> Iterable[int]:
        """Slots of the commands' keys, in order."""
        if isinstance(commands, PageReads):
            slot_of = self._table(commands.generation, commands.table).__getitem__
            return map(slot_of, commands.pages.tolist())
        return map(self.of_one, commands)

    def of_one(self, command: Command) -> int:
        """Slot of one command's key."""
        if isinstance(command, PageRead):
            return self._table(command.generation, command.table)[command.page]
        if isinstance(command, OverlayRead | OverlayWrite):
            name = self._keys.overlay(command.generation, command.table, command.hash_hex)
            return key_slot(name.encode())
        if isinstance(command, AskingCommand):
            return self.of_one(command.command)
        return key_slot(command.key.encode())

    def _table(self, generation: str, table: str) -> PageSlots:
        page_slots = self._pages.get((generation, table))
        if page_slots is None:
            if len(self._pages) >= _RUNS_MAX:
                self._pages.clear()
            page_slots = self._pages[generation, table] = PageSlots(self._keys, generation, table)
        return page_slots


class Scatter:
    """A scatter that ends when the last node has answered or its own tier gave it up: each has its own deadline only.

    What a node redirects is sent on, `REDIRECTS_MAX` times at most and within `window_s` of the first one.
    """

    def __init__(
        self, commands: Sequence[Command], keep: Keep, nodes: Nodes, slots: Slots, window_s: float
    ) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands, self._nodes, self._slots, self._window_s = commands, nodes, slots, window_s
        self._part = PipelinePart(commands, b"", 0, self.result, keep)
        self._answers: list[L2Result] = []
        self._columns: list[tuple[Sequence[int], Frames]] = []
        self._parts = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self) -> "asyncio.Future[Any]":
        """Sends each node its own commands; returns the future of what `keep` makes of the answers, awaits nothing."""
        groups: dict[RemoteTier | None, list[int]] = {}
        owner = self._nodes.of_slot
        for index, slot in enumerate(self._slots.of(self._commands)):
            groups.setdefault(owner(slot), []).append(index)
        if len(groups) == 1:
            (tier,) = groups
            if tier is not None:
                tier.submit(self._commands, self._all_landed)
                return self.result
        self._expect(len(groups))
        for tier, indexes in groups.items():
            if tier is None:
                self._fail_unserved(indexes)
            else:
                tier.submit(
                    _select_commands(self._commands, indexes), partial(self._landed, indexes, 0)
                )
        return self.result

    def _expect(self, parts: int) -> None:
        unavailable = TierUnavailable("Redis did not answer in time", reason="timeout")
        self._answers = [unavailable] * len(
            self._commands
        )  # also what has not landed at the window's end
        self._parts = parts

    def _all_landed(self, answers: Sequence[L2Result]) -> None:
        if isinstance(answers, Frames):  # as they are, for who reads columns
            self._part.land(answers)
            return
        self._expect(1)
        self._landed(range(len(answers)), 0, answers)

    def _fail_unserved(self, indexes: Sequence[int]) -> None:
        self._nodes.refresh_soon()
        unavailable = TierUnavailable(
            "no node of the Redis Cluster serves this slot", reason="connection"
        )
        self._landed(indexes, REDIRECTS_MAX, [unavailable] * len(indexes))

    def _landed(self, indexes: Sequence[int], hop: int, answers: Sequence[L2Result]) -> None:
        if self.result.done():  # by whoever left, or by the window's end
            return
        try:
            self._merge_results(indexes, hop, answers)
        except Exception as error:  # whatever a node said: who waits has no other end
            log.exception("what a node answered cannot be taken")
            strange = TierUnavailable(f"a strange answer: {error!r}", reason="connection")
            self._part.land([strange] * len(self._commands))

    def _merge_results(self, indexes: Sequence[int], hop: int, answers: Sequence[L2Result]) -> None:
        self._parts -= 1
        if isinstance(answers, Frames):
            self._columns.append((indexes, answers))
        else:
            moved: list[int] = []
            for index, answer in zip(indexes, answers, strict=True):
                self._answers[index] = answer
                if isinstance(answer, TierUnavailable):
                    moved.append(index)
            if moved:
                self._follow(moved, hop)
        if not self._parts:
            self._end()

    def _follow(self, indexes: Sequence[int], hop: int) -> None:
        """Send on what was redirected; a node that failed makes its keys misses and the map worth a look."""
        onward: dict[tuple[str, bool], list[int]] = {}
        for index in indexes:
            answer = self._answers[index]
            if not isinstance(answer, Redirected):
                self._nodes.refresh_soon()
            elif hop < REDIRECTS_MAX:
                onward.setdefault((answer.address, answer.is_ask), []).append(index)
                if not answer.is_ask:
                    self._nodes.learn(answer.slot, answer.address)
        self._parts += len(onward)
        if onward and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._end)
        for (address, is_ask), redirected_indexes in onward.items():
            commands = [self._commands[index] for index in redirected_indexes]
            self._nodes.at(address).submit(
                [AskingCommand(command) for command in commands] if is_ask else commands,
                partial(self._landed, redirected_indexes, hop + 1),
            )

    def _end(self) -> None:
        """Ends with what there is; a command that is still on its way was not answered in time, or only redirected."""
        if self._timer is not None:
            self._timer.cancel()
        if sum(len(indexes) for indexes, _ in self._columns) == len(self._commands):
            self._part.land(Frames.merged(self._columns))  # for who reads columns
            return
        for indexes, frames in self._columns:
            for index, payload in zip(indexes, frames.payloads(), strict=True):
                self._answers[index] = payload
        self._part.land(self._answers)


def _select_commands(commands: Sequence[Command], indexes: Sequence[int]) -> Sequence[Command]:
    if isinstance(commands, PageReads):
        pages, offsets = commands.pages.take(indexes), commands.offsets.take(indexes)
        return PageReads(commands.generation, commands.table, pages, offsets, commands.length)
    return [commands[index] for index in indexes]
