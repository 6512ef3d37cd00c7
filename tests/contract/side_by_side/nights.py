"""The first night of a shop, run by both checkouts, and the differences of the two."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from tests.contract.side_by_side.commands import Outcome, difference_of_outcomes, outcomes
from tests.contract.side_by_side.decided import ADDED_GATES
from tests.contract.side_by_side.differences import differences_of_values
from tests.contract.side_by_side.twins import Checkouts
from tests.contract.side_by_side.world import CUTS, NAMESPACE, Shop

COMMANDS: Final = (("night", "--data-until", CUTS[0], "--json"), ("status", "--json"))
MANIFEST: Final = "manifest.json"
INTERNAL: Final = re.compile(r"(work|times)/")
"""Files of a night that only the steps of that night read."""
MOMENTARY: Final = re.compile(r"\.(created_at|user_s|note|speedup_\w+|timings\.\w+)$")
"""Fields of a manifest that say when it was made, how long that took, and how full Redis was."""
HEADROOM_GATES: Final = frozenset({"redis_headroom", "disk_headroom", "memory_headroom"})
"""Gates whose values depend on what Redis, the disk and the memory held at that moment."""
HEADROOM_TOLERANCE: Final = 0.2
"""Relative difference of such a value that two nights beside each other make."""


@dataclass(frozen=True)
class Nights:
    """The first night of each checkout: their shops, the Redis of each, and how their commands ended."""

    shops: tuple[Shop, Shop]
    redis_urls: tuple[str, str]
    outcomes: tuple[list[Outcome], list[Outcome]]

    def files(self, side: int) -> dict[str, bytes]:
        """Return the content of all files of the generation, by their path in it."""
        generation = self.outcomes[side][0].document["generation"]
        folder = self.shops[side].folder / "artifacts" / NAMESPACE / "generations" / generation
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run_nights(folder: Path, checkouts: Checkouts, redis_urls: tuple[str, str]) -> Nights:
    """Run `larder night` of both checkouts over the same sources."""
    sources = Shop(folder / "sources")
    sources.write_sources()
    shops = sources.copied_to(folder / "left"), sources.copied_to(folder / "right")
    environs = [shop.environ(url) for shop, url in zip(shops, redis_urls, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        left_future, right = [
            pool.submit(outcomes, checkout, shop.folder, environ, COMMANDS)
            for checkout, shop, environ in zip(checkouts, shops, environs, strict=True)
        ]
        return Nights(shops, redis_urls, (left_future.result(), right.result()))


def differences_of_nights(nights: Nights) -> list[str]:
    """Differences of both nights: files, their bytes, fields of manifests, exit codes and keys of `--json`."""
    of_outcomes = [
        f"larder {' '.join(before.arguments)}: {difference}"
        for before, after in zip(*nights.outcomes, strict=True)
        if (difference := difference_of_outcomes(before, after)) is not None
    ]
    if any(night.code for night, *_ in nights.outcomes):
        return of_outcomes  # one of them made no generation
    left_files, right = nights.files(0), nights.files(1)
    manifests = [orjson.loads(files.pop(MANIFEST)) for files in (left_files, right)]
    added_gates = ADDED_GATES.difference(gate["rule"] for gate in manifests[0]["gates"])
    manifests[1]["gates"] = [gate for gate in manifests[1]["gates"] if gate["rule"] not in added_gates]
    for left_gate, right_gate in zip(manifests[0]["gates"], manifests[1]["gates"], strict=False):
        values = left_gate["value"], right_gate["value"]
        if (
            left_gate["rule"] == right_gate["rule"] in HEADROOM_GATES
            and None not in values
            and math.isclose(*values, rel_tol=HEADROOM_TOLERANCE)
        ):
            right_gate["value"] = left_gate["value"]
    published = [{path for path in files if not INTERNAL.match(path)} for files in (left_files, right)]
    lines = [f"{path}: on one side alone" for path in sorted(published[0] ^ published[1])]
    lines += [f"{path}: other bytes" for path in sorted(published[0] & published[1]) if left_files[path] != right[path]]
    lines += [
        str(difference)
        for difference in differences_of_values(manifests[0], manifests[1], MANIFEST)
        if not MOMENTARY.search(difference.path)
    ]
    return lines + of_outcomes
