"""Names of datasets as OpenLineage's specification has them: a namespace for the system, a name within it. Pure."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from redis.connection import parse_url

from cache.l2.sentinel.url import is_sentinel, read_url
from cache.l2.slots import is_cluster, seed_urls
from cache.store.object_store import without_secrets

REDIS_PORT = 6379
_AZURE = re.compile(r"abfss?://[^/@:]+@")
"""Container of an Azure account: it stands where elsewhere a name and a password stand."""


@dataclass(frozen=True, slots=True)
class DatasetName:
    """Namespace, such as `s3://bucket` or `file`, and name within it."""

    namespace: str
    name: str

    @classmethod
    def of_url(cls, url: str, *parts: str) -> Self:
        """Name of what lies behind a URL or an absolute path, or further down in it; secrets in it are left out."""
        url = _without_query(url)
        azure = _AZURE.match(url)
        prefix_length = azure.end() if azure else 0
        scheme, _, location_path = (
            f"{url[:prefix_length]}{without_secrets(url[prefix_length:])}".rpartition("://")
        )
        path = PurePosixPath(location_path, *parts)
        if scheme in ("", "file"):
            return cls("file", str(path))
        return cls(f"{scheme}://{path.parts[0]}", "/".join(path.parts[1:]) or "/")

    @classmethod
    def of_pattern(cls, pattern: str, base: str) -> Self:
        """Name of source files: the file, or the folder above the first wildcard; plain ones are relative to `base`."""
        full = _without_query(pattern) if "://" in pattern else str(PurePosixPath(base, pattern))
        fixed_parts = []
        for part in full.split("/"):
            if any(wildcard in part for wildcard in "*?["):
                break
            fixed_parts.append(part)
        return cls.of_url("/".join(fixed_parts))

    @classmethod
    def of_redis(cls, url: str, key: str) -> Self:
        """Name of what lies under a key, or under all keys that begin so: the database's number stands before it.

        The first of several nodes or sentinels stands for all; a service under Sentinel belongs to the system.
        """
        if is_sentinel(url):
            group, connection_options = read_url(url)
            host, port = group.addresses[0]
            address = f"{host}:{port}/{group.service}"
        else:
            connection_options = parse_url(seed_urls(url)[0] if is_cluster(url) else url)  # type: ignore[no-untyped-call]
            address = (
                connection_options.get("path")
                or f"{connection_options.get('host', 'localhost')}:{connection_options.get('port', REDIS_PORT)}"
            )
        return cls(f"redis://{address}", f"{connection_options.get('db', 0)}/{key}")


def _without_query(url: str) -> str:
    """Cut what follows `?` in an address of the web, where it is no wildcard."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url
