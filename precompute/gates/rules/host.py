"""Gates on the readers' hosts: whether the generations of a peak fit the memory and the disk that replicas report."""

from collections.abc import Callable
from dataclasses import replace

from cache.format.gate_rules import DISK_HEADROOM
from precompute.config.generations_at_peak import generations_at_peak
from precompute.control.rows import Replica
from precompute.experiments.room import sum_mapped_bytes
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import integrity
from precompute.gates.evidence.verdict import Measurement, at_least


@integrity(DISK_HEADROOM)
def disk_headroom(candidate: Candidate) -> Measurement:
    """Room on each replica's disk for its copy of this generation."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.disk_headroom

    def judge(replica: Replica) -> Measurement | None:
        free = replica.disk_free_bytes
        return None if free is None else disk_room(free, size_bytes, threshold)

    return _tightest(candidate, threshold, judge)


@integrity("memory_headroom")
def memory_headroom(candidate: Candidate) -> Measurement:
    """Room in the memory available to each replica for what readers map of a peak, arms of experiments included."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.memory_headroom
    generations = generations_at_peak(candidate.keep)
    arms_bytes = sum_mapped_bytes(candidate.arms, generations)

    def judge(replica: Replica) -> Measurement | None:
        available_bytes = replica.memory_available_bytes
        if available_bytes is None:
            return None
        return memory_room(
            available_bytes, size_bytes, threshold, generations=generations, arms_bytes=arms_bytes
        )

    return _tightest(candidate, threshold, judge)


def _tightest(
    candidate: Candidate, threshold: float, judge: Callable[[Replica], Measurement | None]
) -> Measurement:
    """The verdict on the replica with the least room; this host is no reader's, so nobody to ask means passed."""
    replica_verdicts = [
        (replica.name, verdict)
        for replica in candidate.control.replicas()
        if (verdict := judge(replica)) is not None
    ]
    if not replica_verdicts:
        return Measurement(True, None, threshold, "no live replica says what its host has left")
    name, verdict = min(
        replica_verdicts, key=lambda named_verdict: float(named_verdict[1].value or 0)
    )
    return replace(verdict, note=f"{verdict.note} on {name}")


def disk_room(
    free_bytes: int, size_bytes: int, threshold: float, *, generations: int = 1
) -> Measurement:
    """Measured on a file system: has it room for so many generations of this size?"""
    generations_text = "a generation" if generations == 1 else f"{generations} generations"
    return at_least(
        free_bytes / max(1, generations * size_bytes),
        threshold,
        f"{free_bytes:,} bytes free for {generations_text} of {size_bytes:,}",
    )


def memory_room(
    available_bytes: int,
    mapped_bytes: int,
    threshold: float,
    *,
    generations: int,
    arms_bytes: int = 0,
) -> Measurement:
    """Measured on a host's memory: does it hold what readers map of so many generations of this size?

    `arms_bytes` they map of the arms of experiments.
    """
    size_bytes = generations * mapped_bytes
    arms_text = f", arms of experiments {arms_bytes:,}" if arms_bytes else ""
    return at_least(
        available_bytes / max(1, size_bytes + arms_bytes),
        threshold,
        f"{available_bytes:,} bytes available, {generations} generations map {size_bytes:,}{arms_text}",
    )


def _mapped_bytes(candidate: Candidate) -> int:
    return sum(artefact.size_bytes for artefact in candidate.manifest.artefacts())
