"""Gates on Redis: what it may evict, what it holds, and whether everything fits beside everything."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from secrets import token_hex
from typing import Any, Final, cast

import redis

from cache.errors import NotJudged
from cache.format.gate_rules import REDIS_HEADROOM
from cache.l2.sync_clients import compute_keyspace_shares, masters
from cache.resp.reply_shapes import info_number
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.headroom import unevictable_bytes
from precompute.bulk.load import BadPage, Part, load_part, parts_of, verify_part
from precompute.bulk.parts import total_pages
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import integrity
from precompute.gates.evidence.verdict import Measurement, at_most

CHUNK_BYTES: Final = 1 << 20


@integrity("maxmemory_policy")
def maxmemory_policy(candidate: Candidate) -> Measurement:
    """Redis may evict overlays only."""
    return Measurement(True, candidate.control.check_policy(), "volatile-* or noeviction")


@integrity(REDIS_HEADROOM)
def redis_headroom(candidate: Candidate) -> Measurement:
    """Room that what cannot be evicted leaves Redis to work, with this generation loaded beside all others."""
    servers = masters(candidate.control.client)
    measurements = [_headroom(candidate, name, server) for name, server in servers.items()]
    failed = [measurement for measurement in measurements if not measurement.passed]
    return (failed or sorted(measurements, key=_share_used))[-1]


def _share_used(measurement: Measurement) -> float:
    return measurement.value if isinstance(measurement.value, float) else 0.0


def _headroom(candidate: Candidate, name: str, server: "redis.Redis") -> Measurement:
    used = info_number(cast(Any, server.info("memory")), "used_memory")
    if candidate.pages_bytes is not None:
        used = unevictable_bytes(
            candidate.control,
            server,
            pages_bytes=candidate.pages_bytes
            * compute_keyspace_shares(candidate.control.client)[name],
            record_bytes=max(
                table.layout.size_bytes for table in candidate.manifest.stored_tables.values()
            ),
        )
    room = redis_room(name, used, *memory_limit(server), candidate.thresholds.redis_headroom)
    if not candidate.arms:
        return room
    arms = "; ".join(map(str, candidate.arms))
    return replace(room, note=f"{room.note}, with arms of experiments: {arms}")


def memory_limit(server: "redis.Redis") -> tuple[int, str]:
    """Bytes that a server may use, 0 where it does not say, and what sets that limit."""
    info = dict(cast(Any, server.info("memory")))
    if limit := info_number(info, "maxmemory", 0):
        return limit, "maxmemory"
    return info_number(info, "total_system_memory", 0), "its host's memory (maxmemory is not set)"


def redis_room(
    name: str, used_bytes: int, limit: int, limit_source: str, threshold: float
) -> Measurement:
    """Measured on a server's free room; servers have the names of `cache.l2.sync_clients.masters`."""
    if not limit:
        return Measurement(
            False,
            None,
            threshold,
            "Redis states neither maxmemory nor its host's memory",
        )
    where = "" if name == "primary" else f" of {name}"
    return at_most(
        used_bytes / limit,
        threshold,
        f"{used_bytes:,} bytes of {limit:,}, {limit_source}{where}",
    )


@integrity("pages_in_redis")
def pages_in_redis(candidate: Candidate) -> Measurement:
    """Every page, read back from Redis, has its checksum; what Redis lost is loaded once more.

    What is done is noted in Redis itself, part by part, so that another try goes on from there: notes of a server that
    has started since are worth nothing, and whoever writes a part drops its note.
    """
    control, manifest = candidate.control, candidate.manifest
    notes_key, parts = control.keys.loaded(manifest.generation), parts_of(manifest)
    started = _run_ids(control.client)
    notes: Any = control.client.hgetall(notes_key)
    reload_count = 0
    pacing = candidate.governor and open_governor(candidate.governor, control)
    with pacing or nullcontext() as governor:
        for part in parts:
            note = b" ".join((part.loaded_digest, started))
            if notes.get(part.read.encode()) == note:
                continue
            reload_count += _read_back(candidate, part, governor)
            with suppress(redis.exceptions.OutOfMemoryError):  # only the next try would miss it
                control.client.hset(notes_key, part.read, note.decode())
    pages = total_pages(manifest)
    control.client.hdel(notes_key, *(part.read for part in parts))
    reload_text = (
        f"pages whose checksum matched, {reload_count} parts of them loaded once more"
        if reload_count
        else ""
    )
    return Measurement(True, pages, pages, reload_text or "pages whose checksum matched")


def _read_back(candidate: Candidate, part: Part, governor: Governor | None) -> bool:
    """Returns whether the part had to be loaded once more; raises NotJudged when not even that helped."""
    part_arguments = (
        candidate.control.client, candidate.control.keys, candidate.manifest, candidate.root, part,
    )  # fmt: skip
    try:
        verify_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
        return False
    except BadPage:
        # The generation is not to blame: its files are as they should be, Redis lost or changed what it was sent.
        load_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
    try:
        verify_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
    except BadPage as error:
        raise NotJudged(
            f"Redis does not hold what it is sent: loaded again, {error.message}",
            rule="pages_in_redis",
        ) from error
    return True


def _run_ids(client: "redis.Redis") -> bytes:
    """Run ids of all masters: another one, or one that has started since, may not have what was read."""
    server_infos: list[Any] = [server.info("server") for server in masters(client).values()]
    # Who says none may have started at any time.
    return ",".join(
        sorted(str(each.get("run_id") or token_hex()) for each in server_infos)
    ).encode()
