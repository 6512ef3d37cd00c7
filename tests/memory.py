"""A Redis and an artefact store in memory, for tests with millions of steps; a test may watch every call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import redis

from cache.control import control_keys
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore

Watch = Callable[[str, str], None]
"""(command or method, its first key or path): called before it takes effect."""


def unwatched(_command: str, _name: str) -> None:
    """A `Watch` that does nothing."""


class MemoryStore(ArtefactStore):
    """Small files in a dictionary."""

    def __init__(self, watch: Watch = unwatched) -> None:
        super().__init__("/nowhere")
        self.files: dict[str, bytes] = {}
        self.watch = watch
        self._folders: dict[str, list[str]] = {}

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes."""
        self.watch("read", path)
        return self.files.get(path)

    def write(self, path: str, data: bytes) -> None:
        """Replace a file."""
        self.watch("write", path)
        self.files[path] = data
        self._folders.clear()

    def write_once(self, path: str, data: bytes) -> bool:
        """Create a file."""
        self.watch("write_once", path)
        if path in self.files:
            return False
        self.files[path] = data
        self._folders.clear()
        return True

    def names(self, path: str) -> list[str]:
        """Return the children of a folder."""
        self.watch("names", path)
        if (children := self._folders.get(path)) is None:
            start = f"{path}/"
            inside = {
                file_path[len(start) :].split("/", 1)[0] for file_path in self.files if file_path.startswith(start)
            }
            children = self._folders[path] = sorted(inside)
        return children

    def delete(self, path: str) -> None:
        """Remove a file or a folder."""
        self.watch("delete", path)
        start = f"{path}/"
        self.files = {
            file_path: data
            for file_path, data in self.files.items()
            if file_path != path and not file_path.startswith(start)
        }
        self._folders.clear()

    def local(self, path: str) -> Path:
        """Return a path that does not exist."""
        return Path("/nowhere", path)


class MemoryRedis:
    """The commands of `Control` and its two scripts; a contract test compares it with a real Redis.

    `moved` is told of each pointer written by a script, `rows` of each registry row. With `loses_reply` set, the next
    script takes effect, but its caller sees a broken connection.
    """

    def __init__(self, keys: Keyspace, clock: Callable[[], float], watch: Watch = unwatched) -> None:
        self.keys, self.clock, self.watch = keys, clock, watch
        self.data: dict[str, Any] = {}
        self.loses_reply = False
        self.moved: Callable[[bytes | None, bytes], None] = lambda _previous_raw, _after: None
        self.rowed: Callable[[str, dict[str, Any]], None] = lambda _generation, _row: None

    def time(self) -> tuple[int, int]:
        """Return seconds and microseconds."""
        self.watch("time", "")
        now_s = self.clock()
        return int(now_s), int(1e6 * (now_s % 1))

    def get(self, name: str) -> bytes | None:
        """Return a string."""
        self.watch("get", name)
        stored_bytes: bytes | None = self.data.get(name)
        return stored_bytes

    def set(self, name: str, value: bytes | str) -> None:
        """Set a string; only a script may write the pointer."""
        self.watch("set", name)
        if name == self.keys.live:
            raise AssertionError("the pointer was written without comparing")
        self.data[name] = _bytes(value)

    def exists(self, name: str) -> int:
        """Return 1 if the key exists, else 0."""
        self.watch("exists", name)
        return int(name in self.data)

    def strlen(self, name: str) -> int:
        """Return the length of a string."""
        self.watch("strlen", name)
        return len(self.data.get(name, b""))

    def unlink(self, *names: str) -> int:
        """Remove keys."""
        self.watch("unlink", names[0])
        return sum(self.data.pop(name, None) is not None for name in names)

    def hget(self, name: str, field: str) -> bytes | None:
        """Return a field of a hash."""
        self.watch("hget", name)
        field_value: bytes | None = self.data.get(name, {}).get(field.encode())
        return field_value

    def hgetall(self, name: str) -> dict[bytes, bytes]:
        """Return a whole hash."""
        self.watch("hgetall", name)
        return dict(self.data.get(name, {}))

    def hset(self, name: str, field: str, value: bytes | str) -> None:
        """Set a field."""
        self.watch("hset", name)
        self._hset(name, field.encode(), _bytes(value))

    def hdel(self, name: str, *fields: str) -> None:
        """Remove fields, and with the last one the hash."""
        self.watch("hdel", name)
        hash_fields = self.data.get(name, {})
        for field in fields:
            hash_fields.pop(field.encode(), None)
        if not hash_fields:
            self.data.pop(name, None)

    def zadd(self, name: str, members: dict[bytes, float]) -> None:
        """Add members with scores."""
        self.data.setdefault(name, {}).update(members)

    def zrem(self, name: str, member: bytes) -> None:
        """Remove a member."""
        self.data.get(name, {}).pop(member, None)

    def zrangebyscore(self, name: str, low: float, high: float, *, withscores: bool) -> list[tuple[bytes, float]]:
        """Return members between two scores, by score."""
        self.watch("zrangebyscore", name)
        scores = self.data.get(name, {}).items()
        members = [(member, score) for member, score in scores if low <= score <= high]
        return sorted(members, key=lambda member_score: member_score[1])

    def zremrangebyscore(self, name: str, low: str, high: float | str) -> int:
        """Remove members up to a score, or from above it, with `(score`."""
        self.watch("zremrangebyscore", name)
        score_by_member, above = self.data.get(name, {}), float(low.lstrip("("))
        removed_members = [
            member
            for member, score in score_by_member.items()
            if (score > above if low.startswith("(") else score >= above) and score <= float(high)
        ]
        for member in removed_members:
            del score_by_member[member]
        return len(removed_members)

    def publish(self, _channel: str, _message: str) -> int:
        """Publish to no listener."""
        return 0

    def config_get(self, name: str) -> dict[str, str]:
        """Return the settings that Larder needs."""
        return {name: "volatile-lru"}

    def eval(self, script: str, count: int, *arguments: Any) -> Any:
        """Run one of the two scripts of `control`."""
        self.watch("eval", script)
        argv = [_bytes(argument) for argument in arguments[count:]]
        reply = self.move(argv) if script == control_keys._MOVE_SCRIPT else self.write_rows(argv)
        if self.loses_reply:
            self.loses_reply = False
            raise redis.exceptions.ConnectionError("the reply was lost")
        return reply

    def move(self, argv: list[bytes]) -> list[Any]:
        """Run the script that moves the pointer."""
        expected, raw, states = argv[:3]
        to, stored_pointer = orjson.loads(raw), self.data.get(self.keys.live)
        if stored_pointer is not None:
            pointer = orjson.loads(stored_pointer)
            if str(pointer["epoch"]).encode() != expected:
                is_own = all(pointer[field_name] == to[field_name] for field_name in ("attempt", "generation"))
                is_same = _canary(pointer) == _canary(to)
                if is_own and is_same and pointer["epoch"] > int(expected):
                    return [1, stored_pointer]
                return [0, stored_pointer]
        elif expected != b"0":
            return [0, b""]
        state = self._state(to["generation"])
        if state == "retired" or (states and f" {state} " not in states.decode()):
            return [2, state.encode(), to["generation"].encode()]
        if (canary := to.get("canary")) is not None:
            tried = self._state(canary["generation"])
            if tried != "verified":
                return [2, tried.encode(), canary["generation"].encode()]
        if to["previous"] is not None and self._state(to["previous"]) == "retired":
            return [0, stored_pointer or b""]
        self.moved(stored_pointer, raw)
        self.data[self.keys.live] = raw
        for field, value in zip(argv[3::2], argv[4::2], strict=True):
            was = self._state(field.decode())
            is_gone = was == "unknown" and orjson.loads(value)["state"] == "rolled_back"
            if was != "retired" and not is_gone:
                self._hset(self.keys.generations, field, value)
        return [1, raw]

    def write_rows(self, argv: list[bytes]) -> int:
        """Run the script that writes states if the pointer is the expected one."""
        stored_pointer = self.data.get(self.keys.live)
        pointer = None if stored_pointer is None else orjson.loads(stored_pointer)
        if (b"0" if pointer is None else str(pointer["epoch"]).encode()) != argv[0]:
            return 0
        rows = list(zip(argv[2::2], argv[3::2], strict=True))
        if pointer is not None and argv[1]:
            named = {pointer["generation"], (pointer.get("canary") or {}).get("generation")}
            named |= {pointer["previous"]} if argv[1] == b"previous" else set()
            if any(field.decode() in named for field, _ in rows):
                return 2
        for field, value in rows:
            is_final = self._state(field.decode()) == "retired"
            if not is_final or orjson.loads(value)["state"] == "retired":
                self._hset(self.keys.generations, field, value)
        return 1

    def _state(self, generation: str) -> str:
        row = self.data.get(self.keys.generations, {}).get(generation.encode())
        return "unknown" if row is None else str(orjson.loads(row)["state"])

    def _hset(self, name: str, field: bytes, value: bytes) -> None:
        if name == self.keys.generations:
            self.rowed(field.decode(), orjson.loads(value))
        self.data.setdefault(name, {})[field] = value


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _canary(pointer: dict[str, Any]) -> tuple[str, float] | None:
    canary = pointer.get("canary")
    return None if canary is None else (canary["generation"], canary["percent"])
