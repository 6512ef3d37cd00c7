"""A pipeline's parts, each one caller's share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cache.l2.commands import Answer, Command

Keep = Callable[[Sequence[Answer]], Any]


def as_it_is(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Keeps all answers, unchanged."""
    return answers


@dataclass(slots=True, eq=False)
class Part:
    """A caller's commands in one turn of the event loop, and the future of what it keeps of the answers."""

    commands: Sequence[Command]
    packed: bytes
    count: int
    answers: asyncio.Future[Any]
    keep: Keep
    length: int = 0
    """Bytes of every reply's payload, if all is found; 0 where replies differ."""

    def land(self, answers: Sequence[Answer]) -> None:
        """Ends the part: its future gets what `keep` makes of the answers, or its error, unless the caller left."""
        # A caller that left has cancelled its future; its replies end here.
        if self.answers.done():
            return
        try:
            kept = self.keep(answers)
        except (
            Exception
        ) as error:  # costs one caller its answer, and none of the others of this turn
            self.answers.set_exception(error)
        else:
            self.answers.set_result(kept)
