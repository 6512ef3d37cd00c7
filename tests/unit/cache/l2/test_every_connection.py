"""No module opens a connection of redis-py's whose replies are unbounded, or makes a client that takes any reply."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[4]
FOLDERS = ("cache", "serving", "precompute", "infra", "dags")


def test_no_other_connection_is_opened() -> None:
    """Modules that make a client or a pool of redis-py's name a bounded parser."""
    files = [
        file
        for folder in ("cache", "serving", "precompute", "infra", "dags")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "redis" in (text := file.read_text()) and "cache.l2.resp" not in text
    ]
    unbounded = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and _opens(call)
    ]
    assert unbounded == []


def test_every_client_checks_its_replies() -> None:
    """Modules that make a client of redis-py's, or Sentinel's that makes some, name `check_replies`."""
    files = [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "redis" in (text := file.read_text()) and "check_replies" not in text
    ]
    unchecked = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and _makes_client(call)
    ]
    assert unchecked == []


def _makes_client(call: ast.Call) -> bool:
    """True for `Redis(...)`, `redis.Redis.from_url(url)` and `Sentinel(...)`, not for a pool."""
    name_parts = ast.unparse(call.func).split(".")
    kinds = ("Redis", "RedisCluster", "Sentinel", "AsyncSentinel")
    return name_parts[-1] in kinds or (name_parts[-1] in ("from_url", "from_pool") and name_parts[-2] in kinds)


def _opens(call: ast.Call) -> bool:
    """True for `Redis(host)`, `redis.Redis.from_url(url)`, `ConnectionPool(...)`, not for one over a pool."""
    name_parts = ast.unparse(call.func).split(".")
    if any(keyword.arg == "connection_pool" for keyword in call.keywords):
        return False
    return name_parts[-1] in ("Redis", "ConnectionPool", "RedisCluster") or (
        name_parts[-1] == "from_url" and name_parts[-2] in ("Redis", "ConnectionPool", "RedisCluster")
    )
