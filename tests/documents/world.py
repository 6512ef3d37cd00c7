"""The shop of the documents: user 42, items 1302 and 1128, three nights in a real Redis."""

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.demo.synthetic import WorldSettings, synthesize
from precompute.config.settings import night_config
from precompute.reference.train import train_reference
from tests.integration.nights import publish_night, write_clicks
from tests.integration.program import ROOT

SETTINGS = """
namespace = "shop"
shards = 2
keep = 3
threads = 1
warm_timeout_s = 1
bundle = "bundle"
artifacts = "artifacts"
state = "state"
[sources]
interactions = ["interactions/*.parquet"]
item_features = "items.parquet"
[reference]
dims = 16
[tables.user_topk]
kind = "user_topk"
k = 50
[tables.user_vector]
kind = "user_vector"
"""
SHOP_VARIABLES = ("REDIS_URL", "LARDER_CONFIG")
"""Variables that say where the shop's things are."""
CUTS = ("2026-01-28T00:00:00Z", "2026-01-29T00:00:00Z", "2026-01-30T00:00:00Z")


def environment(redis_url: str, folder: Path) -> dict[str, str]:
    """Return the environment of a shell in the folder: our programs, this Redis, the shop's settings."""
    base_environ = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    return base_environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REDIS_URL": redis_url,
        "LARDER_CONFIG": str(folder / "larder.toml"),
        "LARDER_DEADLINE_MS": "3000",
        "LARDER_L2_DEADLINE_MS": "500",
        "LARDER_POLL_S": "0.2",
    }


def build(folder: Path, redis_url: str) -> str:
    """Write data and settings of the shop, train its model and publish three generations; return the live one."""
    clicks = synthesize(WorldSettings(user_count=400, item_count=400))
    clicks = replace(
        clicks,
        user_ids=tuple(map(str, range(len(clicks.user_ids)))),
        item_ids=tuple(str(1001 + number) for number in range(len(clicks.item_ids))),
    )
    sources = folder / "interactions"
    sources.mkdir()
    write_clicks(sources, clicks)
    (sources / "items.parquet").rename(folder / "items.parquet")
    (folder / "larder.toml").write_text(SETTINGS)
    request_columns = {
        "at": pa.array([datetime(2026, 1, 30, tzinfo=UTC)] * 1_000),
        "user": [str(n % 97) for n in range(1_000)],
    }
    pq.write_table(pa.table(request_columns), folder / "requests.parquet")
    config = night_config(str(folder / "larder.toml"), {"REDIS_URL": redis_url})
    train_reference(config, data_until=CUTS[0])
    return [publish_night(config, cut) for cut in CUTS][-1]
