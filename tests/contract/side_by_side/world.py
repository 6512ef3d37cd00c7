"""A shop with all that a request can meet: nights, arms, a canary, filters, facets, events, damaged pages."""

import hashlib
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from cache.process.redis_server import join_or_start_server
from cache.store.blocklist import change_blocklist
from infra.demo.synthetic import WorldSettings, synthesize
from infra.local.airflow import MANUAL_SCHEDULE
from precompute.bundles.bundle import write_bundle
from precompute.config.settings import NightConfig, night_config
from precompute.traffic import experiments
from precompute.traffic.canary import trial
from precompute.traffic.experiments import ArmOption, ExperimentOption
from tests.conftest import redis_binary
from tests.integration.feature_towers import (
    COUNTRIES,
    DIMS,
    from_history_and_country,
    from_looks,
    from_mood,
    vectors_column,
)
from tests.integration.nights import build_verified, pin, publish_night, write_clicks

NAMESPACE: Final = "sides"
ARM_NAMESPACE: Final = "sides-b"
CUTS: Final = tuple(f"2026-01-{day}T00:00:00Z" for day in (27, 28, 29))
"""Cuts of the previous generation, the live one, and the one that a canary tries."""
USERS, ITEMS = 150, 300
BRANDS: Final = ("acme", "best", "größe", "x,y", "initech")
TAGS: Final = ("new", "sale", "blue", "red")
FEATURE_TEXT_BYTES: Final = 4_096
LIMITS: Final = {"max_history": 300, "max_exclude": 300, "max_ids": 1_500, "max_numbers": 3_000, "body_bytes": 400_000}
"""Bounds of a request, low enough for cheap requests to reach them."""
OF_ONE: Final = 400
"""Events of one user that are accepted."""

SCOPES: Final = ("read", "score", "feedback", "events", "explain", "admin")
TOKENS: Final = {name: f"token-of-{name}" for name in ("all", "reader", "expired", "slow", "few", "single")}
"""Token by its name; `all` may do everything."""
_TOKENS_FILE: Final[Mapping[str, Mapping[str, Any]]] = {
    "all": {"scopes": SCOPES},
    "reader": {"scopes": ("read",)},
    "expired": {"scopes": SCOPES, "expires_at": "2026-01-01T00:00:00+00:00"},
    "slow": {"scopes": SCOPES, "requests_per_s": 0.0001},
    "few": {"scopes": SCOPES, "entities_per_s": 0.0001},
    "single": {"scopes": SCOPES, "in_flight": 1},
}
"""Scopes and quotas of tokens: rates so low that none has room twice in a run."""

_DAY_US: Final = 86_400_000_000
_SETTINGS: Final = """
namespace = "{namespace}"
artifacts = "artifacts"
state = "state"
bundle = "bundle"
schedule = "{never}"
shards = 2
page_bytes = 4096
threads = 1
superseded_grace_s = 86400.0
feature_text_bytes = {text_bytes}
[sources]
interactions = ["interactions.parquet"]
user_features = "users.parquet"
item_features = "items.parquet"
item_attributes = ["brand", "tags", "price", "stock", "since"]
[events]
of_one = {of_one}
{events}
[tables.user_topk]
kind = "user_topk"
k = 40
[tables.near_topk]
kind = "user_topk"
k = 10
[tables.user_vector]
kind = "user_vector"
precision = "f4"
[tables.item_vector]
kind = "item_vector"
[tables.item_similar]
kind = "item_similar"
k = 20
metric = "cosine"
[tables.user_mood]
kind = "value"
value = "mood"
precision = "f4"
[filters.in_stock]
filter = {{"==" = ["stock", true]}}
tables = ["user_topk"]
[filters.cheap]
filter = {{"<" = ["price", 20]}}
[facets.brands]
attribute = "brand"
k = 15
[gates]
{gates}
[serving.near.near_topk]
error = 0.5
overlap = 0.5
[serving.rerank.varied]
diversify = {{attribute = "brand", most = 2}}
[serving.rerank.fresh]
boost = [{{filter = {{">" = ["since", "2025-01-01"]}}, factor = 6.0}}]
"""
_LENIENT: Final = (
    "index_recall", "int8_overlap", "int8_cosine", "skew_overlap", "skew_cosine", "exact", "distinct_lists",
    "list_jaccard", "list_jaccard_retrained", "distinct_lists_of_live", "heldout_of_live",
)  # fmt: skip
_SHIFTING: Final = ("score_psi", "score_psi_retrained", "top_items", "single_item", "top_items_of_live", "stale_lists")

CALM: Final[Mapping[str, str]] = {
    **{f"LARDER_{name.upper()}": str(bound) for name, bound in LIMITS.items()},
    "LARDER_IDLE_TIMEOUT_S": "3600",
    "LARDER_DEADLINE_MS": "10000",
    "LARDER_DEADLINE_MAX_MS": "60000",
    "LARDER_L2_DEADLINE_MS": "10000",
    "LARDER_LEASE_WAIT_MS": "0",
    "LARDER_QUEUE_TARGET_MS": "60000",
    "LARDER_QUEUE_INTERVAL_MS": "60000",
    "LARDER_BREAKER_THRESHOLD": "1000000",
    "LARDER_OVERLAY_TTL_S": "86400",
    "LARDER_NEGATIVE_TTL_S": "86400",
    "LARDER_OVERLAY_READS": "always",
    "LARDER_SKETCH_S": "0",
    "LARDER_QUALITY_PER_MILLE": "0",
    "LARDER_LOG_SHARE": "0",
    "LARDER_POLL_S": "0.2",
    "LARDER_BLOCKLIST_POLL_S": "0.1",
    "LARDER_SCHEDULE": MANUAL_SCHEDULE,
}
"""Settings under which no answer depends on how fast the machine is, or on what ends while a run goes on."""


@dataclass(frozen=True)
class RedisCopy:
    """Keys of a Redis: their values as DUMP gives them, and their remaining milliseconds (0: no expiry)."""

    keys: tuple[tuple[bytes, int, bytes], ...]

    @classmethod
    def of(cls, url: str, names: Sequence[str] = ()) -> "RedisCopy":
        """The keys of these names, by default all but heartbeats."""
        with redis.Redis.from_url(url, protocol=3) as client:
            key_names: list[Any] = list(names) or sorted(
                name for name in client.scan_iter() if not name.endswith(b":replicas")
            )
            rows: list[Any] = [(name, client.pttl(name), client.dump(name)) for name in key_names]
        return cls(tuple((name, max(0, left_ms), dumped) for name, left_ms, dumped in rows if dumped))

    def restore(self, url: str) -> None:
        """Write all keys, replacing existing ones."""
        with redis.Redis.from_url(url, protocol=3) as client, client.pipeline(transaction=False) as pipe:
            for name, left_ms, dumped in self.keys:
                pipe.restore(name, left_ms, dumped, replace=True)
            pipe.execute()


@dataclass(frozen=True)
class ShopFacts:
    """Ids, words and generations of the shop, from which requests are drawn."""

    users: tuple[str, ...]
    removed_users: tuple[str, ...]
    """Users whom the previous generation alone knows."""
    items: tuple[str, ...]
    blocked_items: tuple[str, ...]
    blocked_users: tuple[str, ...]
    generations: tuple[str, ...]
    """Live, previous, that of the canary, and of the arm."""
    tokens: Mapping[str, str]
    """Token by its name in the file."""


@dataclass
class Shop:
    """Folder of the shop, its state in Redis before any request, and all that is known of it."""

    folder: Path
    facts: ShopFacts = field(init=False)
    redis: RedisCopy = field(init=False)

    def copied_to(self, folder: Path) -> "Shop":
        """Return the same shop in another folder, whose changes do not affect this one."""
        copied = copy(self)
        copied.folder = Path(shutil.copytree(self.folder, folder))
        return copied

    def config(self, redis_url: str, settings: str = "larder") -> NightConfig:
        """Settings of its nights."""
        return night_config(str(self.folder / f"{settings}.toml"), self.environ(redis_url, settings))

    def environ(self, redis_url: str, settings: str = "larder") -> dict[str, str]:
        """Environment of its programs."""
        return {
            "REDIS_URL": redis_url, "LARDER_CONFIG": str(self.folder / f"{settings}.toml"),
            "LARDER_ACTOR": "a test",
        }  # fmt: skip

    def write_sources(self) -> None:
        """Write data, bundle, settings and tokens: the same bytes each time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clicks = synthesize(WorldSettings(user_count=USERS, item_count=ITEMS, seed=5))
        write_clicks(self.folder, clicks)
        users = [*clicks.user_ids, *(f"featured-{number}" for number in range(4))]
        moods = np.random.default_rng(5).random((len(users), 2)).astype("f4").tolist()
        table = {
            "user": users, "country": pa.array([row % COUNTRIES for row in range(len(users))], pa.int64()),
            "mood": pa.array(moods, pa.list_(pa.float32())),
        }  # fmt: skip
        pq.write_table(pa.table(table), self.folder / "users.parquet")
        pq.write_table(_items_table(clicks.item_ids), self.folder / "items.parquet")
        vectors = {"item": clicks.item_ids, "vector": vectors_column(len(clicks.item_ids), 4)}
        pq.write_table(pa.table(vectors), self.folder / "vectors.parquet")
        write_bundle(
            self.folder / "bundle", name="sides", version="1", dims=DIMS, item_ids=list(clicks.item_ids),
            user_tower=from_history_and_country(len(clicks.item_ids)), item_tower=from_looks(),
            values={"mood": from_mood()},
        )  # fmt: skip
        gates = [*(f"{name} = 0.0" for name in _LENIENT), *(f"{name} = 1000.0" for name in _SHIFTING)]
        for name, namespace, events in (
            ("larder", NAMESPACE, "enabled = true"),
            ("arm", ARM_NAMESPACE, f'enabled = true\nnamespace = "{NAMESPACE}"'),
            ("bare", NAMESPACE, ""),
        ):
            text = _SETTINGS.format(
                namespace=namespace, never=MANUAL_SCHEDULE, events=events, gates="\n".join(gates), of_one=OF_ONE,
                text_bytes=FEATURE_TEXT_BYTES,
            )  # fmt: skip
            (self.folder / f"{name}.toml").write_text(text)
        entries = {name: {"sha256": _digest_of(TOKENS[name]), **entry} for name, entry in _TOKENS_FILE.items()}
        tokens = self.folder / "tokens.json"
        tokens.write_bytes(orjson.dumps({"version": 1, "tokens": entries}))
        tokens.chmod(0o600)

    def without_users(self, count: int) -> tuple[str, ...]:
        """Remove the rows of some users from the sources of the following nights; return these users."""
        path = self.folder / "interactions.parquet"
        clicks = pq.read_table(path)
        removed_users = sorted(set(clicks["user"].to_pylist()))[3 : 3 + count]
        keep = pa.array([user not in removed_users for user in clicks["user"].to_pylist()])
        pq.write_table(clicks.filter(keep), path)
        users = pq.read_table(self.folder / "users.parquet")
        keep = pa.array([user not in removed_users for user in users["user"].to_pylist()])
        pq.write_table(users.filter(keep), self.folder / "users.parquet")
        return tuple(removed_users)


def finish_shop(shop: Shop, redis_url: str) -> None:
    """Add to a first night more generations, an arm, a canary, a blocklist and damaged pages."""
    config, arm = shop.config(redis_url), shop.config(redis_url, "arm")
    previous = _live(config, redis_url)
    removed_users = shop.without_users(8)
    live = publish_night(config, CUTS[1])
    of_arm = publish_night(arm, CUTS[0])
    tried = build_verified(config, CUTS[2])
    pin(config, previous)
    users = tuple(sorted(set(pq.read_table(shop.folder / "interactions.parquet")["user"].to_pylist())))
    items = tuple(pq.read_table(shop.folder / "items.parquet")["item"].to_pylist())
    blocked_items, blocked_users = items[5:8], users[:2]
    change_blocklist(
        config.store(),
        block_items=[item.encode() for item in blocked_items],
        block_entities=[user.encode() for user in blocked_users],
    )
    _damage(redis_url, live)
    shop.redis = RedisCopy.of(redis_url)
    shop.facts = ShopFacts(
        users, removed_users, items, blocked_items, blocked_users, (live, previous, tried, of_arm), TOKENS
    )


def start_experiment(config: NightConfig) -> None:
    """Start the experiment, in which the service's own namespace is the control."""
    arms = (ArmOption("control", NAMESPACE, 0.5), ArmOption("b", ARM_NAMESPACE, 0.5))
    experiments.start(config, ExperimentOption(NAMESPACE, "ranker", arms, 0.4))


def start_canary(config: NightConfig) -> None:
    """Start a canary of the newest generation that is verified."""
    trial.start(config, None, percent=30.0, attempt="canary")


def _damage(redis_url: str, live: str) -> None:
    """Remove one page of each kind of table, and corrupt another."""
    with redis.Redis.from_url(redis_url, protocol=3) as client:
        for table in ("user_vector", "near_topk"):
            pages = sorted(client.scan_iter(f"larder:1:{NAMESPACE}:g:{live}:{table}:*"))
            client.delete(pages[0])
            size: Any = client.strlen(pages[1])
            client.setrange(pages[1], 0, b"\xff" * size)


def _live(config: NightConfig, redis_url: str) -> str:
    with redis.Redis.from_url(redis_url, protocol=3) as client:
        raw: Any = client.get(config.keyspace().live)
    return str(orjson.loads(raw)["generation"])


def _items_table(item_ids: tuple[str, ...]) -> pa.Table:
    rng = random.Random(7)
    rows = [_drawn_attributes(rng) for _ in item_ids]
    return pa.table({
        "item": item_ids,
        "looks": vectors_column(len(item_ids), 3),
        "brand": pa.array([row.get("brand") for row in rows], pa.string()),
        "tags": pa.array([row.get("tags") for row in rows], pa.list_(pa.string())),
        "price": pa.array([row.get("price") for row in rows], pa.float64()),
        "stock": pa.array([row.get("stock") for row in rows], pa.bool_()),
        "since": pa.array([row.get("since") for row in rows], pa.timestamp("us", tz="UTC")),
    })  # fmt: skip


def _drawn_attributes(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "brand": rng.choice(BRANDS), "tags": tuple(rng.sample(TAGS, rng.randrange(4))),
        "price": round(rng.uniform(1, 100), 2), "stock": rng.random() < 0.8,
        "since": 20_000 * _DAY_US + rng.randrange(400) * _DAY_US,
    }  # fmt: skip
    return {name: value for name, value in drawn.items() if rng.random() < 0.95}


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run an empty Redis in a folder of its own; yield its URL."""
    with join_or_start_server(folder, server_binary=redis_binary()) as running:
        yield running.url


def _digest_of(token: str) -> str:
    """SHA-256 of a token, as the tokens file has it."""
    return hashlib.sha256(token.encode()).hexdigest()
