"""Pieces of a night as functions that another process can be told to run."""

from dataclasses import replace

from cache.errors import Refused
from precompute.config.settings import NightConfig
from precompute.steps import pipeline
from precompute.steps.night import run_night


def night(config: NightConfig, cut: str, attempt: str) -> dict[str, str]:
    """A whole night; its generation."""
    lines = run_night(config, data_until=cut, run_after=None, attempt=attempt)
    return {"generation": lines[0].what.split()[0]}


def build(config: NightConfig, cut: str) -> str:
    """Everything before the load; the generation."""
    begun = pipeline.begin(config, data_until=cut, run_after=None)
    pipeline.embed_items(config, begun)
    scored = [pipeline.score_shard(config, begun, shard) for shard in begun["shards"]]
    pipeline.assemble(config, begun, scored)
    pipeline.build_index(config, begun)
    pipeline.quantize(config, begun)
    return str(begun["generation"])


def refused(config: NightConfig, generation: str, attempt: str) -> str:
    """A verification that demands what nothing can reach; what it says."""
    demanding = replace(config, gates=replace(config.gates, coverage_of_source=1.5))
    try:
        pipeline.verify(demanding, {"generation": generation}, attempt=attempt)
    except Refused as error:
        return error.message
    raise AssertionError(f"{generation} was not refused")
