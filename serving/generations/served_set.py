"""Generations that answer requests, as one value that a request captures."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from cache.store.blocklist import Blocklist
from cache.store.releases import Canary
from serving.generations.snapshot import Snapshot
from serving.requests.errors import Problem


@dataclass(frozen=True, slots=True, eq=False)
class ServedGenerations:
    """Live snapshot and, if held, the previous one and the next one (which a canary may try out)."""

    live: Snapshot
    previous: Snapshot | None = None
    next: Snapshot | None = None
    canary: Canary | None = None
    """Canary that tries out `next`; None without a canary, or while its generation is not held."""

    def pin_generation(self, generation: str | None) -> Self:
        """Return the generations for a request that pins `generation`; raise Problem (409) if that is not held."""
        if generation is None:
            return self
        # A generation that is only staged is not published.
        pinnable_snapshots = (self.live, self.previous, None if self.canary is None else self.next)
        for snapshot in pinnable_snapshots:
            if snapshot is not None and snapshot.generation == generation:
                return dataclasses.replace(self, live=snapshot, previous=None, next=None, canary=None)
        raise Problem(
            409, "generation_gone", f"generation {generation!r} is not live or previous here",
            field="generation", held=list(self.generations),
        )  # fmt: skip

    def for_canary(self, next_snapshot: Snapshot) -> Self:
        """Return the generations for a canary's request: the next generation, with the live one as its fallback."""
        return dataclasses.replace(self, live=next_snapshot, previous=self.live, next=None, canary=None)

    @property
    def generation_by_role(self) -> dict[str, str]:
        """Generation of each role: live, previous, and next or canary."""
        snapshot_by_role = {"live": self.live, "previous": self.previous}
        snapshot_by_role["next" if self.canary is None else "canary"] = self.next
        return {role: snapshot.generation for role, snapshot in snapshot_by_role.items() if snapshot is not None}

    @property
    def generations(self) -> tuple[str, ...]:
        """Ids of the held generations, the live one first."""
        return tuple(snapshot.generation for snapshot in self.snapshots)

    def with_blocklist(self, blocklist: Blocklist) -> Self:
        """Return all generations with another blocklist."""
        return self.map_snapshots(lambda snapshot: snapshot.with_blocklist(blocklist))

    def map_snapshots(self, change_snapshot: Callable[[Snapshot], Snapshot]) -> Self:
        """Return all generations, each changed by a function."""
        return dataclasses.replace(
            self,
            live=change_snapshot(self.live),
            previous=self.previous and change_snapshot(self.previous),
            next=self.next and change_snapshot(self.next),
        )

    def find(self, generation: str | None) -> Snapshot | None:
        """Return the held snapshot of a generation, None if it is not held."""
        return next((snapshot for snapshot in self.snapshots if snapshot.generation == generation), None)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Held snapshots, the live one first."""
        return tuple(snapshot for snapshot in (self.live, self.previous, self.next) if snapshot is not None)
