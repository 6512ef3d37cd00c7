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
    threshold, info = candidate.thresholds.redis_headroom, dict(cast(Any, server.info("memory")))
    limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
    used = int(info["used_memory"])
    if not limit:
        return Verdict(
            "redis_headroom",
            False,
            None,
            threshold,
            "Redis states neither maxmemory nor its host's memory",
        )
    if candidate.pages_bytes is not None:
        used = unevictable_bytes(
            candidate.control,
            server,
            pages_bytes=candidate.pages_bytes * shares(candidate.control.client)[name],
            record_bytes=max(each.layout.size_bytes for each in candidate.manifest.tables.values()),
        )
    what = (
        "maxmemory" if int(info.get("maxmemory", 0)) else "its host's memory (maxmemory is not set)"
    )
    where = "" if name == "primary" else f" of {name}"
    return at_most(
        "redis_headroom", used / limit, threshold, f"{used:,} bytes of {limit:,}, {what}{where}"
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
