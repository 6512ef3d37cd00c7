"""Pieces of a night as functions that another process can be told to run."""

from dataclasses import replace

from cache.errors import Refused
from precompute.config.settings import NightConfig
from precompute.steps import assemble, begin, embed_items, index, quantize, score, verify
from precompute.steps.night import Night, run_night


def night(config: NightConfig, cut: str, attempt: str) -> dict[str, str]:
    """Run a whole night; return its generation."""
    lines = run_night(Night(config, attempt, cut))
    return {"generation": lines[0][1].result_summary.split()[0]}


def build(config: NightConfig, cut: str) -> str:
    """Run everything before the load; return the generation."""
    begun_build = begin.run(config, data_until=cut, run_after=None)
    embed_items.run(config, begun_build)
    for shard in begun_build["shards"]:
        score.run_shard(config, begun_build, shard)
    assemble.run(config, begun_build)
    index.run(config, begun_build)
    quantize.run(config, begun_build)
    return str(begun_build["generation"])


def refused(config: NightConfig, generation: str, attempt: str) -> str:
    """Run a verification with thresholds that nothing can reach; return its result."""
    demanding = replace(config, gates=replace(config.gates, coverage_of_source=1.5))
    try:
        verify.run(demanding, {"generation": generation}, attempt=attempt)
    except Refused as error:
        return error.message
    raise AssertionError(f"{generation} was not refused")
