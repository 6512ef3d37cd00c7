"""Gates on the readers' hosts: whether the generations of a peak fit the memory and the disk that replicas report."""

from collections.abc import Callable
from dataclasses import replace

from cache.format.gate_rules import DISK_HEADROOM
from precompute.config.generations_at_peak import generations_at_peak
from precompute.control.rows import Replica
from precompute.experiments.room import mapped_beside
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import integrity
from precompute.gates.evidence.verdict import Measured, at_least


@integrity(DISK_HEADROOM)
def disk_headroom(candidate: Candidate) -> Measured:
    """Room on each replica's disk for its copy of this generation."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.disk_headroom

    def judge(replica: Replica) -> Measured | None:
        free = replica.disk_free_bytes
        return None if free is None else disk_room(free, size_bytes, threshold)

    return _tightest(candidate, threshold, judge)


@integrity("memory_headroom")
def memory_headroom(candidate: Candidate) -> Measured:
    """Room in the memory available to each replica for what readers map of a peak, arms of experiments included."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.memory_headroom
    generations = generations_at_peak(candidate.keep)
    beside_bytes = mapped_beside(candidate.arms, generations)

    def judge(replica: Replica) -> Measured | None:
        left = replica.memory_available_bytes
        if left is None:
            return None
        return memory_room(
            left, size_bytes, threshold, generations=generations, beside_bytes=beside_bytes
        )

    return _tightest(candidate, threshold, judge)


def _tightest(
    candidate: Candidate, threshold: float, judge: Callable[[Replica], Measured | None]
) -> Measured:
    """The verdict on the replica with the least room; this host is no reader's, so nobody to ask means passed."""
    found = [
        (each.name, verdict)
        for each in candidate.control.replicas()
        if (verdict := judge(each)) is not None
    ]
    if not found:
        return Measured(True, None, threshold, "no live replica says what its host has left")
    name, verdict = min(found, key=lambda each: float(each[1].value or 0))
    return replace(verdict, note=f"{verdict.note} on {name}")


def disk_room(
    free_bytes: int, size_bytes: int, threshold: float, *, generations: int = 1
) -> Measured:
    """Measured on a file system: has it room for so many generations of this size?"""
    what = "a generation" if generations == 1 else f"{generations} generations"
    return at_least(
        free_bytes / max(1, generations * size_bytes),
        threshold,
        f"{free_bytes:,} bytes free for {what} of {size_bytes:,}",
    )


def memory_room(
    available_bytes: int,
    mapped_bytes: int,
    threshold: float,
    *,
    generations: int,
    beside_bytes: int = 0,
) -> Measured:
    """Measured on a host's memory: does it hold what readers map of so many generations of this size?

    `beside_bytes` they map of the arms of experiments.
    """
    size_bytes = generations * mapped_bytes
    beside = f", arms of experiments {beside_bytes:,}" if beside_bytes else ""
    return at_least(
        available_bytes / max(1, size_bytes + beside_bytes),
        threshold,
        f"{available_bytes:,} bytes available, {generations} generations map {size_bytes:,}{beside}",
    )


def _mapped_bytes(candidate: Candidate) -> int:
    return sum(artefact.size_bytes for artefact in candidate.manifest.artefacts())
