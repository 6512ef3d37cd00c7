"""Fills Feast's Redis store; runs in Feast's own environment, where nothing of this project can be imported.

`python feast_store.py FOLDER HOST:PORT` makes a Feast repository in FOLDER, materialises FOLDER/users.parquet through
it and prints Feast's version and the entities per second as JSON. `feast --chdir FOLDER serve` then serves it.
"""

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = """\
project: larder_bench
provider: local
registry:
  path: registry.db
  cache_ttl_seconds: 3600
offline_store:
  type: file
online_store:
  type: redis
  connection_string: "{redis}"
entity_key_serialization_version: 3
"""


def views(source: Path) -> list[Any]:
    """Two feature views over one file: the record as bytes, and its first items and scores as arrays.

    A feature service of each, named `<view>_vector`, has Feast keep a vector of its features per user
    (`precompute_online`), which a request reads as one value.
    """
    feast, types = import_module("feast"), import_module("feast.types")
    user = feast.Entity(name="user", join_keys=["user"], value_type=feast.ValueType.STRING)
    file = feast.FileSource(name="users", path=str(source), timestamp_field="event_timestamp")
    record = [feast.Field(name="record", dtype=types.Bytes)]
    arrays = [
        feast.Field(name="items", dtype=types.Array(types.String)),
        feast.Field(name="scores", dtype=types.Array(types.Float32)),
    ]
    tables = [
        feast.FeatureView(name="bytes", entities=[user], schema=record, source=file),
        feast.FeatureView(name="arrays", entities=[user], schema=arrays, source=file),
    ]
    services = [
        feast.FeatureService(name=f"{feature_view.name}_vector", features=[feature_view], precompute_online=True)
        for feature_view in tables
    ]
    return [user, file, *tables, *services]


def main() -> None:
    """Apply and materialise, which precomputes; a request for a user without a vector fails."""
    folder, redis = Path(sys.argv[1]).resolve(), sys.argv[2]
    (folder / "feature_store.yaml").write_text(REPOSITORY.format(redis=redis))
    store = import_module("feast").FeatureStore(repo_path=str(folder))
    store.apply(views(folder / "users.parquet"))
    current_time, day, started_at = datetime.now(UTC), timedelta(days=1), time.monotonic()
    store.materialize(current_time - day, current_time + day)
    print(json.dumps({"version": version("feast"), "seconds": time.monotonic() - started_at}))


if __name__ == "__main__":
    main()
