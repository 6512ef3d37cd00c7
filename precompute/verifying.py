"""Verifying a generation: its files and its gates, then refused or fit to be published."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cache.artefacts import fetch_checked, generation_path
from cache.errors import (
    CorruptArtefact,
    Refused,
)
from cache.items import ItemTable
from cache.manifest import (
    Manifest,
)
from precompute.build import (
    Build,
    Progress,
    Step,
    fetch_partition,
    quiet,
)
from precompute.config import NightConfig
from precompute.gates import Candidate, run_gates
from precompute.registry import open_releases
from precompute.sealing import seal
from precompute.skew import skew_shards
from precompute.states import State, demand


def verify(
    config: NightConfig,
    build: Mapping[str, Any],
    *,
    attempt: str = "shell",
    progress: Progress = quiet,
) -> Step:
    """Run every gate; a failed one refuses the generation for good reason, written down."""
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    with open_releases(config) as releases:
        ledger = releases.ledger()
        state = releases.state(made.generation, ledger)
        if state in (State.LIVE, State.SUPERSEDED):
            return {"generation": made.generation, "gates": len(manifest.gates), "verified": True}
        demand("verify", made.generation, state)
        files = _files(made, manifest)
        for shard in skew_shards(manifest.entity_sets["user"]):
            fetch_partition(made, shard)
        live = None
        if ledger.live is not None:
            raw = made.store.read(generation_path(ledger.live, "manifest.json"))
            live = Manifest.from_bytes(raw) if raw is not None else None
        candidate = Candidate(
            manifest, made.root, ItemTable.open(made.root, manifest), releases.control, live,
            config.gates, config.history_limit,
        )  # fmt: skip
        verdicts = [files, *(each.to_json() for each in run_gates(candidate))]
        progress("verify", len(verdicts), len(verdicts))
        # It may have gone live, or have been retired, while the gates ran: its manifest is then as released.
        demand("verify", made.generation, releases.state(made.generation))
        manifest = replace(
            manifest,
            gates=tuple(verdicts),
            timings={**manifest.timings, "verify": time.perf_counter() - started},
        )
        made.store.write(generation_path(made.generation, "manifest.json"), manifest.to_bytes())
        failed = [gate for gate in manifest.gates if not gate["passed"]]
        if failed:
            reasons = "; ".join(
                f"{gate['rule']} is {gate['value']}, the threshold {gate['threshold']} {gate['note']}".strip()
                for gate in failed
            )
            releases.refuse(made.generation, reason=reasons, attempt=attempt)
            raise Refused(
                f"{made.generation} is refused, the live generation stays: {reasons}",
                rule=failed[0]["rule"], value=failed[0]["value"], threshold=failed[0]["threshold"],
            )  # fmt: skip
        releases.mark_verified(made.generation, attempt=attempt)
    return {"generation": made.generation, "gates": len(manifest.gates), "verified": True}


def _files(made: Build, manifest: Manifest) -> Step:
    """Every file of the generation against its checksum, as a gate."""
    files = [*manifest.artefacts(), *manifest.pages()]
    try:
        for artefact in files:
            fetch_checked(made.store, made.generation, artefact)
    except CorruptArtefact as error:
        return {
            "rule": "files",
            "passed": False,
            "value": error.message,
            "threshold": "checksums",
            "note": "",
        }
    return {
        "rule": "files",
        "passed": True,
        "value": len(files),
        "threshold": len(files),
        "note": "",
    }
