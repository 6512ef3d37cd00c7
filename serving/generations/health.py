"""Health of a replica: how far it can be trusted, and why not. Pure."""

from dataclasses import dataclass
from typing import Literal

About = Literal["background", "blocklist", "events", "eviction", "experiments", "pointer", "redis"]


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness of a replica; the other fields say why it is less than it should be, or None.

    `degraded` and `failed` repeat what errors say, which names files, hosts and checksums: for whoever has the token.
    """

    ready: bool
    stale: str | None
    degraded: str | None
    failed: str | None
    outside: str | None = None
    """`failed` as anybody may hear it."""

    def to_public_json(self) -> dict[str, bool | str | None]:
        """Health fields without the details that errors hold."""
        degraded = None if self.degraded is None else "no_model"
        return {
            "ready": self.ready,
            "stale": self.stale,
            "degraded": degraded,
            "failed": self.outside,
        }


class Concerns:
    """Reasons why answers may lag behind: at most one word about each thing that is followed."""

    def __init__(self, about: About, reason: str) -> None:
        self.text: str | None = reason
        """All reasons, with commas between, or None; what callers and probes read."""
        self._by_subject: dict[About, str] = {about: reason}

    def note(self, about: About, reason: str | None) -> bool:
        """Sets a concern, None ends it; returns whether that is news."""
        if self._by_subject.get(about) == reason:
            return False
        if reason is None:
            del self._by_subject[about]
        else:
            self._by_subject[about] = reason
        self.text = ",".join(reason for _, reason in sorted(self._by_subject.items())) or None
        return True
