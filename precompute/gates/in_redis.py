"""Gates on Redis: what it may evict, what it holds, and whether everything fits beside everything."""

from contextlib import nullcontext
from typing import Any, Final, cast

import redis

from cache.manifest import Manifest
from cache.servers import masters, shares
from precompute.bulk.governor import open_governor
from precompute.bulk.headroom import unevictable_bytes
from precompute.bulk.load import BadPage, parts_of, verify_part
from precompute.gates.candidate import Candidate
from precompute.gates.verdict import Verdict, at_most

READ_CHUNK_BYTES: Final = 1 << 20


def maxmemory_policy(candidate: Candidate) -> Verdict:
    """Redis may evict overlays only."""
    return Verdict(
        "maxmemory_policy", True, candidate.control.check_policy(), "volatile-* or noeviction"
    )


def redis_headroom(candidate: Candidate) -> Verdict:
    """With this generation loaded beside all others, what cannot be evicted leaves Redis room to work."""
    servers = masters(candidate.control.client)
    verdicts = [_headroom(candidate, name, server) for name, server in servers.items()]
    failed = [each for each in verdicts if not each.passed]
    return (failed or sorted(verdicts, key=_share_used))[-1]


def _share_used(verdict: Verdict) -> float:
    return verdict.value if isinstance(verdict.value, float) else 0.0


def _headroom(candidate: Candidate, name: str, server: "redis.Redis") -> Verdict:
    used = int(cast(Any, server.info("memory"))["used_memory"])
    if candidate.pages_bytes is not None:
        used = unevictable_bytes(
            candidate.control,
            server,
            pages_bytes=candidate.pages_bytes * shares(candidate.control.client)[name],
            record_bytes=max(each.layout.size_bytes for each in candidate.manifest.tables.values()),
        )
    return redis_verdict(name, used, *memory_limit(server), candidate.thresholds.redis_headroom)


def memory_limit(server: "redis.Redis") -> tuple[int, str]:
    """Bytes that a server may use, 0 where it does not say, and what sets that limit."""
    info = dict(cast(Any, server.info("memory")))
    if limit := int(info.get("maxmemory", 0)):
        return limit, "maxmemory"
    return int(info.get("total_system_memory", 0)), "its host's memory (maxmemory is not set)"


def redis_verdict(name: str, used_bytes: int, limit: int, what: str, threshold: float) -> Verdict:
    """Whether a server, named as `cache.servers.masters` does, is left room to work; `what` sets the limit."""
    if not limit:
        return Verdict(
            "redis_headroom",
            False,
            None,
            threshold,
            "Redis states neither maxmemory nor its host's memory",
        )
    where = "" if name == "primary" else f" of {name}"
    return at_most(
        "redis_headroom",
        used_bytes / limit,
        threshold,
        f"{used_bytes:,} bytes of {limit:,}, {what}{where}",
    )


def pages_in_redis(candidate: Candidate) -> Verdict:
    """Every page, read back from Redis, has its checksum."""
    client, keys, manifest = candidate.control.client, candidate.control.keys, candidate.manifest
    pages, bad = 0, []
    pacing = candidate.governor and open_governor(candidate.governor, candidate.control)
    with pacing or nullcontext() as governor:
        for part in parts_of(manifest):
            # Every part is read, also after a bad one: one more `load` must repair them all.
            try:
                pages += verify_part(
                    client, keys, manifest, candidate.root, part,
                    chunk_bytes=READ_CHUNK_BYTES, governor=governor,
                )  # fmt: skip
            except BadPage as error:
                bad.append(error.message)
    return Verdict(
        "pages_in_redis",
        not bad,
        pages,
        manifest_pages(manifest),
        bad[0] if bad else "pages whose checksum matched",
    )


def manifest_pages(manifest: Manifest) -> int:
    """Pages of all tables."""
    return sum(table.pages for table in manifest.tables.values())
