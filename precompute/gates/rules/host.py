"""Gates on the readers' hosts: whether the generations of a peak fit the memory and the disk that replicas report."""

from collections.abc import Callable
from dataclasses import replace

from precompute.config.generations_at_peak import generations_at_peak
from precompute.control.control_keys import Replica
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.verdict import Verdict, at_least


def disk_headroom(candidate: Candidate) -> Verdict:
    """Room on each replica's disk for its copy of this generation."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.disk_headroom

    def judge(replica: Replica) -> Verdict | None:
        free = replica.disk_free_bytes
        return None if free is None else disk_verdict(free, size_bytes, threshold)

    return _tightest(candidate, "disk_headroom", threshold, judge)


def memory_headroom(candidate: Candidate) -> Verdict:
    """Room in the memory available to each replica for what readers map of the generations of a peak."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.memory_headroom
    generations = generations_at_peak(candidate.keep)

    def judge(replica: Replica) -> Verdict | None:
        left = replica.memory_available_bytes
        if left is None:
            return None
        return memory_verdict(left, size_bytes, threshold, generations=generations)

    return _tightest(candidate, "memory_headroom", threshold, judge)


def _tightest(
    candidate: Candidate, rule: str, threshold: float, judge: Callable[[Replica], Verdict | None]
) -> Verdict:
    """The verdict on the replica with the least room; this host is no reader's, so nobody to ask means passed."""
    found = [
        (each.name, verdict)
        for each in candidate.control.replicas()
        if (verdict := judge(each)) is not None
    ]
    if not found:
        return Verdict(rule, True, None, threshold, "no live replica says what its host has left")
    name, verdict = min(found, key=lambda each: float(each[1].value or 0))
    return replace(verdict, note=f"{verdict.note} on {name}")


def disk_verdict(
    free_bytes: int, size_bytes: int, threshold: float, *, generations: int = 1
) -> Verdict:
    """Verdict on a file system: has it room for so many generations of this size?"""
    what = "a generation" if generations == 1 else f"{generations} generations"
    return at_least(
        "disk_headroom",
        free_bytes / max(1, generations * size_bytes),
        threshold,
        f"{free_bytes:,} bytes free for {what} of {size_bytes:,}",
    )


def memory_verdict(
    available_bytes: int, mapped_bytes: int, threshold: float, *, generations: int
) -> Verdict:
    """Verdict on a host's memory: does it hold what readers map of so many generations of this size?"""
    size_bytes = generations * mapped_bytes
    return at_least(
        "memory_headroom",
        available_bytes / max(1, size_bytes),
        threshold,
        f"{available_bytes:,} bytes available, {generations} generations map {size_bytes:,}",
    )


def _mapped_bytes(candidate: Candidate) -> int:
    return sum(artefact.size_bytes for artefact in candidate.manifest.artefacts())
