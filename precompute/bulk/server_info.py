"""Figures that a server of Redis gives of itself and that tell how its readers fare."""

from collections.abc import Mapping
from typing import Any

import redis

READS = ("cmdstat_get", "cmdstat_getrange", "cmdstat_mget")


def info_of(server: "redis.Redis") -> dict[str, Any]:
    """Commands, processor time and replication; empty where the user may not ask."""
    try:
        found: Any = server.info("commandstats", "cpu", "replication")
        return dict(found)
    except redis.exceptions.NoPermissionError:
        return {}


def lag_bytes(info: Mapping[str, Any]) -> int:
    """Bytes that the slowest replica of a server lags behind it."""
    offset = int(info.get("master_repl_offset", 0))
    replicas = (
        info.get(f"slave{number}") for number in range(int(info.get("connected_slaves", 0)))
    )
    return max(
        [0]
        + [
            offset - int(each["offset"])
            for each in replicas
            if isinstance(each, dict) and each.get("state") == "online"
        ]
    )


def reads_of(info: Mapping[str, Any]) -> int:
    """Number of commands that read (READS) a server has answered."""
    return sum(int(info[name]["calls"]) for name in READS if name in info)


def cpu_s(info: Mapping[str, Any]) -> float:
    """Processor time of the thread that answers."""
    used = info.get("used_cpu_user_main_thread", 0), info.get("used_cpu_sys_main_thread", 0)
    return float(sum(used))
