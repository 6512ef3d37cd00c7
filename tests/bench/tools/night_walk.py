"""Calls between modules from a shard's task to its pages and to Redis, recorded from running steps.

`python -m tests.bench.tools.night_walk` builds a small night, with a real Redis, up to the step in question, records
the tasks `score` (of one shard) and `load`, and prints the ways to what is done with the shard as one Markdown table.
A hop is a call from one module of ours into another that leads to one of these `DEEDS`; what is called besides (a
setting, a path, a checksum, the sweep before a load) is no part of the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cache.process.redis_server import join_or_start_server
from precompute.config.settings import NightConfig
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score
from tests.call_walk import Call, Recorder
from tests.integration.nights import DATA_UNTIL, prepare

SHARD = 1
DEEDS = {
    "score": {
        "precompute.scoring.users.score_users": "one shard's users, by stages that work side by side",
        "precompute.partitions.shard_input.group_rows_by_entity": "its users are read from their partition",
        "cache.model.tower.Tower.run": "the tower makes vectors of them",
        "cache.topk.topk.Scorer.top": "each is compared with all items",
        "cache.topk.compiled.Kernel.top": "by the kernel, a tile of items at a time",
        "precompute.scoring.pages.encode_records": "the best become records",
        "precompute.scoring.pages.PageFile.append": "records become pages of a file",
        "precompute.builds.build.Build.finish": "files are handed to the store",
        "precompute.builds.build.Build.report": "the report proves that they are whole",
    },
    "load": {
        "precompute.builds.seal.write_manifest": "the manifest lists all files",
        "precompute.bulk.load.PageStream.send": "pages are `SET` in Redis",
        "precompute.bulk.load.load_part.note_landed_pages": "those that landed are marked",
    },
}
"""What is done with a shard, by task and function."""


@dataclass(frozen=True)
class WayHop:
    """A call into another module on the path to a deed, which is one of `DEEDS`."""

    task: str
    module: str
    function: str
    deed: str


def list_hops(task: str, roots: Sequence[Call]) -> list[WayHop]:
    """Return the distinct hops that lead to the deeds of a task, deed by deed."""
    hop_by_target: dict[tuple[str, str], WayHop] = {}
    for deed, deed_text in DEEDS[task].items():
        # Look at the other threads first: what they do with users, the task's own thread does again with items.
        path = next(path for root in reversed(roots) if (path := _path_to(deed, root)))
        for call_target in path:
            module, function = call_target
            hop_by_target.setdefault(
                call_target, WayHop(task, module, function, deed_text if call_target == path[-1] else "")
            )
    return list(hop_by_target.values())


def _path_to(deed: str, call: Call, above: str = "") -> tuple[tuple[str, str], ...]:
    """Return the calls into other modules down to the first call of the deed; none if it is not called."""
    own_hops = () if call.module == above else ((call.module, call.function),)
    if deed == f"{call.module}.{call.function}":
        return ((call.module, call.function),)
    for inner_call in call.calls:
        if path := _path_to(deed, inner_call, call.module):
            return (*own_hops, *path)
    return ()


def walked(task: Callable[[], Any]) -> list[Call]:
    """Return the calls that a task makes, in its thread and in those that it starts."""
    recorder = Recorder()
    with recorder.recording():
        task()
    return recorder.roots


def walk(config: NightConfig) -> list[WayHop]:
    """Return the hops of one shard through both tasks, which are the first on their generation."""
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        if shard != SHARD:
            score.run_shard(config, build, shard)
    scored = walked(lambda: score.run_shard(config, build, SHARD))
    assemble.run(config, build)
    index.run(config, build)
    quantize.run(config, build)
    loaded = walked(lambda: load.run(config, build))
    return [*list_hops("score", scored), *list_hops("load", loaded)]


def table(hops: Sequence[WayHop]) -> str:
    """Return the hops as a Markdown table."""
    lines = ["| hop | task | module | function | there |", "|---|---|---|---|---|"]
    for number, hop in enumerate(hops, 1):
        lines.append(f"| {number} | {hop.task} | `{hop.module}` | `{hop.function}` | {hop.deed} |")
    return "\n".join(lines)


def main() -> None:
    """Print the hops."""
    with TemporaryDirectory() as folder, join_or_start_server(Path(folder) / "redis") as redis:
        hops = walk(prepare(Path(folder) / "night", redis.url))
        print(f"{len(hops)} hops in {len({hop.module for hop in hops})} modules\n")
        print(table(hops))


if __name__ == "__main__":
    main()
