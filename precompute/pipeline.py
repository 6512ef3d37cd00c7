"""The steps of a night: plain functions of small JSON-able values, each safe to repeat under its generation.

begin -> embed_items -> score_shard x N -> assemble -> build_index, quantize -> load -> verify -> publish -> warm
-> retire. Only `publish` changes what users see.

`roll_back` and `restore` are no part of a night: an operator calls them.
"""

from precompute.beginning import begin
from precompute.loading import load
from precompute.models.live_path import build_index, quantize
from precompute.publishing import publish, restore, retire, roll_back, warm
from precompute.scoring.shards import assemble, embed_items, score_shard, score_shards
from precompute.verifying import verify

# In the order of a night.
__all__ = [  # noqa: RUF022
    "begin",
    "embed_items",
    "score_shard",
    "score_shards",
    "assemble",
    "build_index",
    "quantize",
    "load",
    "verify",
    "publish",
    "warm",
    "retire",
    "roll_back",
    "restore",
]
