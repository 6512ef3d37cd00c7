"""A Redis in memory with its own protocol: the commands and scripts of Larder, compared with a real server.

`tests/contract/test_simulated_redis.py` sends both the same bytes.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis
import orjson

from cache.control import control_keys
from cache.format.redis_keys import Keyspace
from cache.l2 import commands, control_plane
from cache.usage import hot_keys
from precompute.releases import staging
from tests.memory import MemoryRedis, Watch, unwatched

OK = "+OK\r\n"
_MORE = object()


class SimulatedRedis(MemoryRedis):
    """Strings, hashes and sorted sets with expiry, and the subscribers of channels."""

    def __init__(self, keys: Keyspace, clock: Callable[[], float], watch: Watch = unwatched) -> None:
        super().__init__(keys, clock, watch)
        self.ends: dict[str, float] = {}
        self.sessions: dict[Session, None] = {}
        self.policy = "volatile-lru"
        self._saved: tuple[dict[str, Any], dict[str, float]] | None = None
        self.scripts: dict[bytes, Callable[[list[str], list[bytes]], Any]] = {
            control_plane._HEARTBEAT_SCRIPT.encode(): self._beat,
            hot_keys.REPORT_SCRIPT.encode(): self._report,
            commands._LEASE_SWAP_SCRIPT: self._swap,
            staging._STAGE_SCRIPT.encode(): self._stage,
            staging._UNSTAGE_SCRIPT.encode(): self._unstage,
            control_keys._MOVE_SCRIPT.encode(): lambda keys, argv: self._in(keys[0], self.move, argv),
            control_keys._WRITE_ROWS_SCRIPT.encode(): lambda keys, argv: self._in(keys[0], self.write_rows, argv),
        }

    def execute(self, command: list[bytes]) -> Any:
        """Return the reply to a command: bytes, int, None, a list, or text that is sent unchanged."""
        self._drop_expired()
        return getattr(self, f"do_{command[0].decode().lower()}")(*command[1:])

    def wipe(self) -> None:
        """Remove everything."""
        self.data.clear()
        self.ends.clear()

    def save(self) -> None:
        """Save the current state, like a snapshot on disk."""
        self._saved = _copied(self.data), dict(self.ends)

    def load(self) -> None:
        """Load the last snapshot, if there is one."""
        if self._saved is not None:
            self.data, self.ends = _copied(self._saved[0]), dict(self._saved[1])

    def _drop_expired(self) -> None:
        if self.ends:
            now_s = self.clock()
            for name in [name for name, end in self.ends.items() if end <= now_s]:
                del self.ends[name]
                self.data.pop(name, None)

    # -- commands

    def do_get(self, name: bytes) -> bytes | None:
        """Return a string."""
        stored_bytes: bytes | None = self.data.get(name.decode())
        return stored_bytes

    def do_mget(self, *names: bytes) -> list[bytes | None]:
        """Return strings."""
        return [self.data.get(name.decode()) for name in names]

    def do_getrange(self, name: bytes, first: bytes, last: bytes) -> bytes:
        """Return a part of a string."""
        stored_bytes: bytes = self.data.get(name.decode(), b"")
        return stored_bytes[int(first) : int(last) + 1]

    def do_set(self, name: bytes, value: bytes, *options: bytes) -> Any:
        """Set a string, with NX, GET and PX in any order."""
        key, option_list = name.decode(), list(options)
        previous_value = self.data.get(key)
        life_ms = int(option_list[option_list.index(b"PX") + 1]) if b"PX" in option_list else None
        if b"NX" not in option_list or previous_value is None:
            self.data[key] = value
            self.ends.pop(key, None)
            if life_ms is not None:
                self.ends[key] = self.clock() + life_ms / 1000
        if b"GET" in option_list:
            return previous_value
        return OK if b"NX" not in option_list or previous_value is None else None

    def do_pttl(self, name: bytes) -> int:
        """Return the remaining milliseconds of a key."""
        key = name.decode()
        if key not in self.data:
            return -2
        return -1 if key not in self.ends else round(1000 * (self.ends[key] - self.clock()))

    def do_expire(self, name: bytes, seconds: bytes) -> int:
        """Set a key's expiry."""
        key = name.decode()
        if key in self.data:
            self.ends[key] = self.clock() + int(seconds)
        return int(key in self.data)

    def do_time(self) -> list[bytes]:
        """Return seconds and microseconds."""
        now_s = self.clock()
        return [b"%d" % int(now_s), b"%d" % int(1e6 * (now_s % 1))]

    def do_zadd(self, name: bytes, score: bytes, member: bytes) -> int:
        """Add a member with a score."""
        score_by_member = self.data.setdefault(name.decode(), {})
        is_new = member not in score_by_member
        score_by_member[member] = float(score)
        return int(is_new)

    def do_zrem(self, name: bytes, *members: bytes) -> int:
        """Remove members."""
        score_by_member = self.data.get(name.decode(), {})
        count = sum(score_by_member.pop(member, None) is not None for member in members)
        if not score_by_member:
            self.data.pop(name.decode(), None)
        return count

    def do_zrevrange(self, name: bytes, first: bytes, last: bytes, _scores: bytes) -> list[bytes]:
        """Return members and scores, greatest first."""
        ranked = sorted(self.data.get(name.decode(), {}).items(), key=lambda e: (-e[1], e[0]))
        # Among members with the same score, Redis returns the greater name first.
        ranked.sort(key=lambda e: e[0], reverse=True)
        ranked.sort(key=lambda e: e[1], reverse=True)
        part = ranked[int(first) : int(last) + 1]
        return [element for member, score in part for element in (member, b"%.17g" % score)]

    def do_hset(self, name: bytes, field: bytes, value: bytes) -> int:
        """Set a field."""
        hash_fields = self.data.setdefault(name.decode(), {})
        is_new = field not in hash_fields
        hash_fields[field] = value
        return int(is_new)

    def do_hdel(self, name: bytes, *fields: bytes) -> int:
        """Remove fields."""
        return self.do_zrem(name, *fields)

    def do_hgetall(self, name: bytes) -> list[bytes]:
        """Return a hash."""
        return [element for pair in self.data.get(name.decode(), {}).items() for element in pair]

    def do_pfadd(self, name: bytes, *members: bytes) -> int:
        """Count distinct members exactly, where Redis estimates."""
        counted_members = self.data.setdefault(name.decode(), {})
        count_before = len(counted_members)
        counted_members.update(dict.fromkeys(members, 1.0))
        return int(len(counted_members) > count_before)

    def do_pfcount(self, name: bytes) -> int:
        """Return the number of distinct members."""
        return len(self.data.get(name.decode(), {}))

    def do_info(self, *_section: bytes) -> bytes:
        """Return the values of INFO that a service reads."""
        return (
            f"# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:{self.policy}\r\n"
            "mem_fragmentation_ratio:1.0\r\n# Stats\r\nevicted_keys:0\r\nexpired_keys:0\r\n"
            "# Server\r\nredis_version:7.0.15\r\nrun_id:0\r\n"
        ).encode()

    def do_client(self, *_arguments: bytes) -> str:
        """Accept CLIENT commands."""
        return OK

    def do_select(self, _number: bytes) -> str:
        """Accept SELECT: there is one database."""
        return OK

    def do_ping(self) -> str:
        """Answer PING."""
        return "+PONG\r\n"

    def do_publish(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers."""
        return self.publish(channel.decode(), message.decode())

    def do_eval(self, script: bytes, count: bytes, *arguments: bytes) -> Any:
        """Run one of Larder's scripts."""
        keys = [raw_key.decode() for raw_key in arguments[: int(count)]]
        return self.scripts[script](keys, list(arguments[int(count) :]))

    # -- for publishers, who hold no connection

    def publish(self, channel: str, message: str) -> int:
        """Send a message to the subscribers; return how many there are."""
        listeners = [session for session in self.sessions if channel in session.channels]
        for listener in listeners:
            listener.push(channel, message)
        return len(listeners)

    def getrange(self, name: str, first: int, last: int) -> bytes:
        """Return a part of a string."""
        self.watch("getrange", name)
        stored_bytes: bytes = self.data.get(name, b"")
        return stored_bytes[first : last + 1]

    def eval(self, script: str, count: int, *arguments: Any) -> Any:
        """Run one of Larder's scripts."""
        self.watch("eval", script)
        raw_arguments = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
        self._drop_expired()
        return self.do_eval(script.encode(), b"%d" % count, *raw_arguments)

    def move(self, argv: list[bytes]) -> list[Any]:
        """Run the script that moves the pointer, and notify the subscribers."""
        previous_raw = self.data.get(self.keys.live)
        reply = super().move(argv)
        if self.data.get(self.keys.live) is not previous_raw:
            self.publish(self.keys.channel, "pointer")
        return reply

    # -- scripts

    def _in(self, name: str, script: Callable[[list[bytes]], Any], argv: list[bytes]) -> Any:
        """Return the reply of a script under the namespace of its first key."""
        previous_keys, self.keys = self.keys, Keyspace(name.partition("{")[2].partition("}")[0])
        try:
            return script(argv)
        finally:
            self.keys = previous_keys

    def _beat(self, keys: list[str], argv: list[bytes]) -> int:
        score_by_member = self.data.setdefault(keys[0], {})
        score_by_member[argv[1]] = float(argv[0])
        if len(argv) > 2 and argv[2] != argv[1]:
            score_by_member.pop(argv[2], None)
        return 1

    def _swap(self, keys: list[str], argv: list[bytes]) -> bytes | None:
        if self.data.get(keys[0]) != argv[0]:
            return None
        self.do_set(keys[0].encode(), argv[1], b"PX", argv[2])
        return argv[1]

    def _report(self, keys: list[str], argv: list[bytes]) -> None:
        last = 3 + 2 * int(argv[2])
        for removed_member in argv[last:]:
            for name in keys:
                self.data.get(name, {}).pop(removed_member, None)
        for at in range(3, last, 2):
            score_by_member = self.data.setdefault(keys[0], {})
            score_by_member[argv[at + 1]] = score_by_member.get(argv[at + 1], 0.0) + float(argv[at])
        self.do_expire(keys[0].encode(), argv[1])

    def _stage(self, keys: list[str], argv: list[bytes]) -> bytes | None:
        attempt, generation, now_s, note = argv
        raw_note = self.data.get(keys[0])
        standing = None if raw_note is None else orjson.loads(raw_note)
        if standing is not None:
            raw = self.data.get(keys[2])
            pointer = {} if raw is None else orjson.loads(raw)
            tried = (pointer.get("canary") or {}).get("generation")
            is_mine = standing["attempt"] == attempt.decode() or standing["generation"] == generation.decode()
            has_moved = standing["generation"] in (pointer.get("generation"), tried)
            if not is_mine and not has_moved and standing["until"] > float(now_s):
                return bytes(raw_note or b"")
        self.data[keys[0]] = note
        if standing is None or standing["generation"] != generation.decode():
            self.publish(keys[1], "next")
        return None

    def _unstage(self, keys: list[str], argv: list[bytes]) -> int:
        raw_note = self.data.get(keys[0])
        note = None if raw_note is None else orjson.loads(raw_note)
        if note and (note["attempt"] == argv[0].decode() or note["generation"] == argv[1].decode()):
            del self.data[keys[0]]
            self.publish(keys[1], "next")
        return 0


def _copied(data: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}


class Session(asyncio.Protocol):
    """A connection to the server, which handles commands one by one as they arrive."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self.channels: dict[str, None] = {}
        self._redis = redis
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection as a possible subscriber."""
        self._transport = transport  # type: ignore[assignment]
        self._redis.sessions[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._redis.sessions.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Answer each complete command."""
        self._reader.feed(data)
        replies: list[bytes] = []
        while (command := self._reader.gets()) is not _MORE:
            replies.append(self._answer(command))
        if replies:
            self._transport.write(b"".join(replies))

    def push(self, channel: str, message: str) -> None:
        """Send a message to the client."""
        message_parts = [b"message", channel.encode(), message.encode()]
        self._transport.write(encoded(message_parts))

    def _answer(self, command_parts: list[bytes]) -> bytes:
        command = command_parts[0].upper()
        if command in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            for raw_channel in command_parts[1:]:
                if command == b"SUBSCRIBE":
                    self.channels[raw_channel.decode()] = None
                else:
                    self.channels.pop(raw_channel.decode(), None)
            return b"".join(
                encoded([command.lower(), raw_channel, len(self.channels)]) for raw_channel in command_parts[1:]
            )
        return encoded(self._redis.execute(command_parts))


def encoded(reply: Any) -> bytes:
    """Encode a reply as Redis sends it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, str):
        return reply.encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
