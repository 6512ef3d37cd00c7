"""Pages in Redis that the model no longer agrees with, though each record is valid for its entity."""

import numpy as np
import redis

from cache.format.redis_keys import Keyspace
from precompute.config.settings import NightConfig
from tests.opened import open_generation


def rearrange(night: NightConfig, generation: str, table: str) -> None:
    """Give every record of a table the list of another one."""
    manifest, _ = open_generation(night.store(), generation)
    layout = manifest.tables[table].layout
    keys = Keyspace(night.namespace)
    with redis.Redis.from_url(str(night.redis_url)) as client:
        for page in range(manifest.tables[table].page_count):
            name = keys.page(generation, table, page)
            rows = np.frombuffer(client.get(name), layout.dtype).copy()
            for field in ("items", "numbers"):
                rows[field] = np.random.default_rng(page).permuted(rows[field], axis=1)
                rows[field] = np.roll(rows[field], len(rows) // 2, axis=0)
            rows["items"] = (rows["items"][:, ::-1] + 17) % manifest.items.count
            client.set(name, rows.tobytes())
