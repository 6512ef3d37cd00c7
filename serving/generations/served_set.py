"""The generations that answers come from, as one value that a request captures when it starts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from cache.control.key_split import Split
from cache.store.blocklist import Blocklist
from serving.generations.snapshot import Snapshot
from serving.requests.errors import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """The live snapshot and, where they are held, the previous one and the next (which a canary tries out)."""

    live: Snapshot
    previous: Snapshot | None = None
    next: Snapshot | None = None
    canary: Split | None = None

    def pinned(self, generation: str | None) -> Self:
        """Holding for a request that pins `generation`; raises Problem (409) if it is not live, previous or canary."""
        if generation is None:
            return self
        # What is only staged has not been published to anybody.
        offered = (self.live, self.previous, None if self.canary is None else self.next)
        for each in offered:
            if each is not None and each.generation == generation:
                return dataclasses.replace(self, live=each, previous=None, next=None, canary=None)
        raise Problem(
            409, "generation_gone", f"generation {generation!r} is not live or previous here",
            field="generation", held=list(self.generations),
        )  # fmt: skip

    def tried(self, next_: Snapshot) -> Self:
        """Holding for a canary's whole request: the next generation, and the live one below it."""
        return dataclasses.replace(self, live=next_, previous=self.live, next=None, canary=None)

    @property
    def roles(self) -> dict[str, str]:
        """Generation of each role: live, previous, and next or canary."""
        named = {"live": self.live, "previous": self.previous}
        named["next" if self.canary is None else "canary"] = self.next
        return {role: each.generation for role, each in named.items() if each is not None}

    @property
    def generations(self) -> tuple[str, ...]:
        """Ids of what is held, the live one first."""
        return tuple(each.generation for each in self.snapshots)

    def with_blocklist(self, blocklist: Blocklist) -> Self:
        """All generations under another blocklist."""
        return self.each(lambda snapshot: snapshot.with_blocklist(blocklist))

    def each(self, change: Callable[[Snapshot], Snapshot]) -> Self:
        """All generations, each changed."""
        return dataclasses.replace(
            self,
            live=change(self.live),
            previous=self.previous and change(self.previous),
            next=self.next and change(self.next),
        )

    def find(self, generation: str | None) -> Snapshot | None:
        """The held snapshot of a generation."""
        return next((each for each in self.snapshots if each.generation == generation), None)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Snapshots that are held, the live one first."""
        return tuple(each for each in (self.live, self.previous, self.next) if each is not None)
