"""Rows that the control keys hold: a generation's in the registry, a replica's last heartbeat."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from cache.formats import FIRST_RELEASE, HEARTBEAT, REGISTRY_ROW, demand, stamp, version_of
from precompute.control.states import State


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """A generation's row in the registry; `at` is Unix seconds."""

    state: State
    at: float
    reason: str = ""

    def to_bytes(self) -> bytes:
        """JSON as stored."""
        fields = {"state": self.state, "at": self.at, "reason": self.reason}
        return orjson.dumps(fields | stamp(REGISTRY_ROW))

    @classmethod
    def from_bytes(cls, raw: bytes) -> "RegistryRow":
        """Reads `to_bytes`; raises ValueError, TypeError, KeyError or AttributeError for anything else.

        UnknownFormat for one of another release.
        """
        data = orjson.loads(raw)
        demand(REGISTRY_ROW, version_of(data))
        return cls(State(data["state"]), float(data["at"]), str(data.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Replica:
    """A serving replica's last heartbeat; times are Redis' own, Unix seconds.

    `ready`: loaded and warmed, `failed`: generation -> why it cannot be loaded there, `l2_p99_ms`: over the last
    few seconds, `canary`: what it counted while one runs, `overlay_ttl_s`: how long its overlays live at most,
    `memory_available_bytes` and `disk_free_bytes`: what its host, or its container, has left, `release`: of its
    program, `reads`: oldest and newest version that it reads, by format.
    """

    name: str
    beat_at: float
    serving: str | None
    held_generations: tuple[str, ...]
    epoch: int | None = None
    ready: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    swapped_at: float | None = None
    warm_s: float | None = None
    l2_p99_ms: float | None = None
    canary: Mapping[str, Any] | None = None
    overlay_ttl_s: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    release: str = FIRST_RELEASE
    reads: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def from_beat(cls, raw: bytes, beat_at: float) -> "Replica":
        """Reads a heartbeat's payload; raises ValueError, TypeError, KeyError or AttributeError for anything else.

        UnknownFormat for one of another release.
        """
        data = orjson.loads(raw)
        demand(HEARTBEAT, version_of(data), f"replica {data['replica']}")
        return cls(
            str(data["replica"]), beat_at, data.get("serving"), tuple(data.get("holds", ())),
            data.get("epoch"), tuple(data.get("ready", ())), data.get("failed") or {},
            data.get("swapped_at"), data.get("warm_s"), data.get("l2_p99_ms"), data.get("canary"),
            data.get("overlay_ttl_s"), data.get("memory_available_bytes"), data.get("disk_free_bytes"),
            str(data.get("release", FIRST_RELEASE)),
            {
                name: (int(oldest), int(newest_version))
                for name, (oldest, newest_version) in data.get("reads", {}).items()
            },
        )  # fmt: skip
