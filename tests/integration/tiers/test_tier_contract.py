"""What is true of every tier, and of both as one: the same suite on L1, L2, its stand-in, and the read path."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import pytest

from cache.format.redis_keys import Keyspace, hash_hex
from cache.l2.commands import Overlay, OverlayRead, OverlayWrite
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.records import pack_overlay, peek_fingerprint, unpack_overlay
from cache.tiers.l1 import Entry, LocalKey, LocalTier, NegativeCache
from cache.tiers.reads import Hit
from cache.tiers.tiered import TieredCache
from tests.fakes import DIGEST_A, GENERATION, NEXT_GENERATION, FakeRemote, Night
from tests.l2_reads import answers_of

NIGHT = Night()
OTHER_TABLE = Night(table="other")
SHORT_S = 0.15
SLACK_S = 0.1
"""What a busy machine may take to write or to answer; a promotion that gave a new life would still be there then."""


class Tier(Protocol):
    """One way to keep a live record of an entity that the night did not know."""

    async def put(self, night: Night, generation: str, id_: str, record: bytes, ttl_s: float) -> None:
        """Keeps `record` for `ttl_s`."""

    async def get(self, night: Night, generation: str, id_: str) -> bytes | None:
        """Return the record, None if it is not there."""


@dataclass
class L1:
    tier: LocalTier

    async def put(self, night: Night, generation: str, id_: str, record: bytes, ttl_s: float) -> None:
        expires_at = asyncio.get_running_loop().time() + ttl_s
        entry = Entry(record, peek_fingerprint(record), DIGEST_A, expires_at)
        self.tier.put(LocalKey(generation, night.table.name, night.record_key(id_).hash_or_digest), entry)

    async def get(self, night: Night, generation: str, id_: str) -> bytes | None:
        entry = self.tier.get(LocalKey(generation, night.table.name, night.record_key(id_).hash_or_digest))
        return None if entry is None else entry.record


@dataclass
class L2:
    tier: RemoteTier | FakeRemote

    async def put(self, night: Night, generation: str, id_: str, record: bytes, ttl_s: float) -> None:
        name = hash_hex(night.record_key(id_).hash_or_digest)
        payload = pack_overlay(record, DIGEST_A)
        write = OverlayWrite(generation, night.table.name, name, payload, ttl_s)
        assert await self.tier.write_overlays([write]) == [None]

    async def get(self, night: Night, generation: str, id_: str) -> bytes | None:
        name = hash_hex(night.record_key(id_).hash_or_digest)
        (overlay,) = await answers_of(self.tier, [OverlayRead(generation, night.table.name, name)])
        if overlay is None:
            return None
        assert isinstance(overlay, Overlay)
        unpacked = unpack_overlay(night.layout, overlay.overlay_value)
        assert unpacked is not None and unpacked[1] == DIGEST_A
        return unpacked[0]


@dataclass
class Tiered:
    tier: TieredCache

    async def put(self, night: Night, generation: str, id_: str, record: bytes, ttl_s: float) -> None:
        self.tier.put_live(night.view(generation), night.record_key(id_), record, DIGEST_A, ttl_s)

    async def get(self, night: Night, generation: str, id_: str) -> bytes | None:
        deadline = asyncio.get_running_loop().time() + 5
        outcome = await self.tier.get(night.view(generation), night.record_key(id_), deadline)
        return outcome.record if isinstance(outcome, Hit) else None


@pytest.fixture(params=["l1", "fake l2", "l2", "tiered", "tiered, another replica"])
async def tier(request: pytest.FixtureRequest, redis_url: str, keyspace: Keyspace) -> AsyncIterator[Tier]:
    timer = asyncio.get_running_loop().time
    remote = RemoteTier(RemoteConfig(redis_url, deadline_s=2.0), keyspace)
    # Keep no negative entries, because the suite looks a key up before its first put.
    tiered_cache = TieredCache(LocalTier(1 << 20), NegativeCache(0, 0), remote)
    match request.param:
        case "l1":
            yield L1(LocalTier(1 << 20, timer))
        case "fake l2":
            yield L2(FakeRemote(timer))
        case "l2":
            yield L2(remote)
        case "tiered":
            yield Tiered(tiered_cache)
        case _:
            yield Replicas(Tiered(tiered_cache), Tiered(TieredCache(LocalTier(0), NegativeCache(0, 0), remote)))
    await tiered_cache.aclose()
    await remote.aclose()


@dataclass
class Replicas:
    """What one process keeps, another reads."""

    writer: Tiered
    reader: Tiered

    async def put(self, night: Night, generation: str, id_: str, record: bytes, ttl_s: float) -> None:
        await self.writer.put(night, generation, id_, record, ttl_s)
        await self.writer.tier.aclose()

    async def get(self, night: Night, generation: str, id_: str) -> bytes | None:
        return await self.reader.get(night, generation, id_)


async def test_what_was_put_comes_back_byte_for_byte(tier: Tier) -> None:
    """As immutable bytes."""
    record = NIGHT.live_record("ada")
    assert await tier.get(NIGHT, GENERATION, "ada") is None

    await tier.put(NIGHT, GENERATION, "ada", record, 60)

    stored_record = await tier.get(NIGHT, GENERATION, "ada")
    assert stored_record == record and type(stored_record) is bytes


async def test_another_entity_table_or_generation_has_none_of_it(tier: Tier) -> None:
    await tier.put(NIGHT, GENERATION, "ada", NIGHT.live_record("ada"), 60)

    assert await tier.get(NIGHT, GENERATION, "bob") is None
    assert await tier.get(OTHER_TABLE, GENERATION, "ada") is None
    assert await tier.get(NIGHT, NEXT_GENERATION, "ada") is None


async def test_a_later_record_takes_the_place_of_an_earlier_one(tier: Tier) -> None:
    await tier.put(NIGHT, GENERATION, "ada", NIGHT.live_record("ada", 1.0), 60)
    await tier.put(NIGHT, GENERATION, "ada", NIGHT.live_record("ada", 2.0), 60)

    assert await tier.get(NIGHT, GENERATION, "ada") == NIGHT.live_record("ada", 2.0)


async def test_no_copy_outlives_the_life_it_was_given(tier: Tier) -> None:
    """Also not one that a reader promoted shortly before the end."""
    loop = asyncio.get_running_loop()
    await tier.put(NIGHT, GENERATION, "ada", NIGHT.live_record("ada"), SHORT_S)
    ends_at = loop.time() + SHORT_S

    assert await tier.get(NIGHT, GENERATION, "ada") is not None
    for _ in range(1000):
        if loop.time() > ends_at + SLACK_S:
            break
        await tier.get(NIGHT, GENERATION, "ada")
        await asyncio.sleep(0.005)

    assert await tier.get(NIGHT, GENERATION, "ada") is None
