"""A fake of the hashes that the dashboard uses in Redis."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from tests.fakes import FakeControl


@dataclass
class FakeRedis(FakeControl):
    """Hashes in a dictionary; with `loses`, a command takes effect and its reply is lost."""

    down: bool = False
    loses: bool = False
    hashes: defaultdict[str, dict[bytes, bytes]] = field(default_factory=lambda: defaultdict(dict))
    call_count: int = 0
    keyspace = Keyspace("test")

    async def execute_all(self, commands: Any) -> list[Any]:
        self.call_count += 1
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        replies = [self._do(*command) for command in commands]
        if self.loses:
            raise TierUnavailable("no reply", reason="timeout")
        return replies

    def _do(self, name: str, key: str, *arguments: Any) -> Any:
        table = self.hashes[key]
        match name:
            case "HSET":
                is_new = arguments[0].encode() not in table
                table[arguments[0].encode()] = arguments[1]
                return int(is_new)
            case "HDEL":
                return sum(
                    table.pop(field_name if isinstance(field_name, bytes) else field_name.encode(), None) is not None
                    for field_name in arguments
                )
            case "HGETALL":
                return dict(table)
            case "EXPIRE":
                return 1
        raise AssertionError(name)

    async def infos(self) -> list[dict[str, Any]]:
        return [{"used_memory": 1}]
