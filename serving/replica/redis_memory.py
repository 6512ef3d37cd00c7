"""Memory that Redis uses and may use."""

from collections.abc import Iterable, Mapping
from typing import Any

from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane


class RedisMemory:
    """Redis memory, asked now and then; `used_bytes`: None while that fails, `max_bytes`: 0 where one has no limit."""

    def __init__(self, control: ControlPlane) -> None:
        self.used_bytes: int | None = None
        self.max_bytes = 0
        self._control = control

    async def refresh(self) -> None:
        """Looks at all servers together: pages spread evenly over the nodes of a cluster."""
        try:
            infos = await self._control.infos()
        except TierUnavailable:
            self.used_bytes = None
            return
        self.used_bytes, self.max_bytes = memory(infos)


def memory(infos: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Bytes used and allowed on all servers together; 0 are allowed where one has no limit."""
    pairs = [(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))) for info in infos]
    limits = [limit for _, limit in pairs]
    return sum(used for used, _ in pairs), sum(limits) if all(limits) else 0
