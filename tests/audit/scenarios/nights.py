"""Nights that copy, held against nights that compute everything, byte by byte."""

from __future__ import annotations

import random
from pathlib import Path

from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Servers, Shape, Shop
from tests.audit.world import iso_time

COPY = "docs/how-to/nights-that-copy.md: The result is the same, byte for byte: the same generation id, the same pages"


def run_nights(stage: Stage) -> None:
    """Two sites over the same sources: one copies from night to night, one begins anew each time."""
    rng = random.Random(f"nights {stage.seed}")
    shape = Shape(users=150, items=120, with_vectors=rng.random() < 0.5)
    copying = Shop.make(stage.folder / "copying", stage.servers, stage.report, stage.seed, shape, "nights")
    cut = iso_time(copying.world.clock)
    copying.night("--data-until", cut)
    copying.serve()
    try:
        round_ = 0
        while not stage.is_over() and round_ < 4:
            round_ += 1
            copying.world.draw_interactions(rng, rng.randrange(1, 25))
            if rng.random() < 0.6:
                copying.world.change_items(rng, 1)
            user = rng.choice(copying.world.users)
            copying.world.countries[user] = rng.randrange(6)
            if copying.world.vectors and rng.random() < 0.5:
                id_ = rng.choice(list(copying.world.vectors))
                copying.world.vectors[id_] = tuple(rng.randrange(-16, 17) / 8 for _ in range(8))
            copying.world.clock += 1
            cut = iso_time(copying.world.clock)
            copied = copying.night("--data-until", cut).id
            for _ in range(25):
                copying.ask_once(rng)
            _compare_with_full(stage, copying, copied, cut, round_)
    finally:
        copying.close()


def _compare_with_full(stage: Stage, copying: Shop, copied: str, cut: str, round_: int) -> None:
    servers = Servers.start(stage.folder / f"full-redis-{round_}")
    full = Shop.make(
        stage.folder / f"full-{round_}",
        servers,
        stage.report,
        stage.seed,
        copying.world.shape,
        "nights",
        world=copying.world,
    )
    try:
        for name in ("interactions", "items.parquet", "users.parquet", "vectors.parquet"):
            source = copying.folder / name
            if source.exists():
                (full.folder / name).symlink_to(source)
        report = full.site.run("night", "--json", "--data-until", cut).document()
        recipe = [
            "two stores over the same sources; in one a night every time rows come, in the other this night alone",
            f"larder night --data-until {cut}",
        ]
        if not stage.require(report["generation"] == copied, "copied id", COPY, report["generation"], copied, recipe):
            return
        copied_pages, theirs = _pages(copying, copied), _pages(full, copied)
        differing = sorted(name for name in theirs if copied_pages.get(name) != theirs[name])
        stage.require(
            not differing and set(copied_pages) == set(theirs),
            "copied pages",
            COPY,
            f"{len(theirs)} equal pages",
            {"differing": differing, "missing": sorted(set(theirs) ^ set(copied_pages))},
            recipe,
        )
        stage.report.count("pages of copying nights compared with full ones", len(theirs))
        _compare_files(stage, copying.folder / "store", full.folder / "store", copied, recipe)
    finally:
        servers.stop()


def _pages(shop: Shop, generation: str) -> dict[str, bytes]:
    """Return digests of the pages that Redis holds of a generation, by key."""
    script = """
    local pages = {}
    for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
      if redis.call('TYPE', key).ok == 'string' and not string.find(key, 'loaded') then
        pages[#pages + 1] = key .. ' ' .. redis.sha1hex(redis.call('GET', key))
      end
    end
    return pages
    """
    reply = shop.servers.pages.command("EVAL", script, "0", f"larder:1:*g:{generation}:*")
    lines = [line for line in reply.split(b"\r\n") if line and line[:1] not in b"*$"]
    return {line.split(b" ")[0].decode(): line.split(b" ")[1] for line in lines}


def _compare_files(stage: Stage, copying_store: Path, theirs: Path, generation: str, recipe: list[str]) -> None:
    """Compare the tables' files of a generation; work files and reports may tell of the copying."""

    def files(store: Path) -> dict[str, bytes]:
        content_by_name = {}
        for path in store.rglob("*"):
            name = str(path.relative_to(store))
            is_report = path.suffix == ".json" or "work" in path.relative_to(store).parts
            if path.is_file() and generation in name and not is_report:
                content_by_name[name] = path.read_bytes()
        return content_by_name

    copied_files, right = files(copying_store), files(theirs)
    differing = sorted(name for name in right if copied_files.get(name) != right[name])
    stage.report.count("files of copying nights compared with full ones", len(right))
    stage.require(not differing, "copied files", COPY, "equal files", differing, recipe)
