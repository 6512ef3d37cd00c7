"""The steps of a night: plain functions of small JSON-able values, each safe to repeat under its generation.

begin -> embed_items -> score_shard x N -> assemble -> build_index, quantize -> load -> verify -> publish -> warm
-> retire. Only `publish` changes what users see.

`roll_back` and `restore` are no part of a night: an operator calls them.
"""

from precompute.steps.begin import begin
from precompute.steps.live_path import build_index, quantize
from precompute.steps.load import load
from precompute.steps.publish import publish, restore, retire, roll_back, warm
from precompute.steps.score import assemble, embed_items, score_shard, score_shards
from precompute.steps.verify import verify

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
