"""The Redis in memory does what a real one does: random commands and scripts, same replies, same keys."""

import random
from typing import Any

import pytest

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import Conflict
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.releases import Canary, Pointer
from tests.memory import MemoryRedis

NAMES = tuple(f"20260101T000000Z-00000000000{suffix}" for suffix in "abcd")


def outcome(call: Any, control: Control) -> Any:
    """A reply, or the words of a Conflict."""
    try:
        return call(control)
    except Conflict as error:
        return str(error), error.details


def random_command(rng: random.Random, epochs: list[int]) -> tuple[str, Any]:
    """One call of `Control`, as likely to succeed as not."""
    name, previous = rng.choice(NAMES), rng.choice([*NAMES, None])
    expected = rng.choice([*epochs[-3:], 0])
    rows = {
        generation: RegistryRow(rng.choice(list(GenerationState)), rng.uniform(0, 9), rng.choice(["", "why"]))
        for generation in rng.sample(NAMES, rng.randrange(3))
    }
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            canary = Canary(rng.choice(NAMES), rng.choice([1.0, 2.5]), 1.0)
            to = Pointer(
                name, max(epochs[-1] + rng.choice([-1, 1, 1_800_000_000_000]), 1), previous,
                rng.choice("xyz"), 1.0, canary if rng.random() < 0.3 else None,
            )  # fmt: skip
            epochs.append(to.epoch)
            allowed = rng.choice([(), (GenerationState.VERIFIED,), (GenerationState.LIVE, GenerationState.SUPERSEDED)])
            return (
                f"move {to} if {expected} {allowed} {rows}",
                lambda control: control.move_pointer(
                    to, expected_epoch=expected, row_by_generation=rows, allowed_states=allowed
                ),
            )
        case 4 | 5:
            unless = rng.choice(["", "live", "previous"])
            return f"mark {rows} if {expected} unless {unless}", lambda control: control.write_rows(
                rows, expected_epoch=expected, unless_named_as=unless
            )
        case 6:
            row = RegistryRow(rng.choice(list(GenerationState)), 1.0)
            return f"set row {name} {row}", lambda control: control.set_row(name, row)
        case _:
            return f"drop row {name}", lambda control: control.drop_row(name)


@pytest.mark.parametrize("seed", range(8))
def test_control_sees_the_same_in_both(redis_url: str, keyspace: Keyspace, seed: int) -> None:
    rng, epochs = random.Random(seed), [1]
    memory = MemoryRedis(keyspace, lambda: 0.0)
    with connect(redis_url, 5.0) as client:
        real, model = Control(client, keyspace), Control(memory, keyspace)  # type: ignore[arg-type]
        for _ in range(100):
            if rng.random() < 0.02:
                client.delete(keyspace.live)
                memory.data.pop(keyspace.live, None)
            command_description, call = random_command(rng, epochs)
            assert outcome(call, real) == outcome(call, model), command_description
            assert real.read_pointer() == model.read_pointer() and real.rows() == model.rows(), command_description
            assert client.get(keyspace.live) == memory.get(keyspace.live)


def test_strings_hashes_and_replicas_are_the_same_in_both(redis_url: str, keyspace: Keyspace) -> None:
    memory = MemoryRedis(keyspace, lambda: 1_000.5)
    with connect(redis_url, 5.0) as client:
        replies = []
        for redis_backend in (client, memory):
            redis: Any = redis_backend
            page, loaded_key = keyspace.page(NAMES[0], "t", 0), keyspace.loaded_parts(NAMES[0])
            redis.set(page, b"12345678")
            redis.hset(loaded_key, "t/0", "mark")
            redis.hset(loaded_key, "t/1", "mark")
            redis.hdel(loaded_key, "t/1")
            for name, at in (("r1", 990.0), ("r2", 999.0), ("r1", 1_000.0), ("r3", 1_004.0)):
                redis.zadd(keyspace.replicas, {b'{"replica":"%s"}' % name.encode(): at})
            control = Control(redis, keyspace)
            replies.append([
                redis.get(page), redis.strlen(page), redis.strlen("none"), redis.hgetall(loaded_key),
                redis.hget(loaded_key, "t/0"), redis.hget(loaded_key, "none"), control.replicas(1_000.5),
                control.forget_dead_replicas(1_000.5, 1.5), control.replicas(1_000.5),
                redis.unlink(page, loaded_key, "none"), redis.get(page), redis.hgetall(loaded_key),
            ])  # fmt: skip
        assert replies[0] == replies[1]
    with pytest.raises(AssertionError, match="without comparing"):
        memory.set(keyspace.live, b"{}")
