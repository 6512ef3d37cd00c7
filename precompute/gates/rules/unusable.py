"""Gate on what was left out: a few rows that say nothing cost nobody else their night, many are a mistake."""

from typing import Any

from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import judgement
from precompute.gates.evidence.verdict import Measured, not_measured


@judgement("unusable_rows")
def unusable_rows(candidate: Candidate) -> Measured:
    """Share of rows, values and answers that could not be used, in the worst source; a single one is always let pass.

    Unless the threshold is 0.
    """
    threshold = candidate.thresholds.unusable_rows
    sources: dict[str, Any] = candidate.manifest.facts.get("unusable", {})
    if not sources:  # an older Larder began the night
        return not_measured(threshold, "nothing was counted")
    shares = {name: _share(each, threshold) for name, each in sources.items()}
    worst = max(shares, key=lambda name: shares[name])
    found = sources[worst]
    note = f"{found['left_out']:,} of {found['rows']:,} of {worst}"
    why = "; ".join(f"{reason}: {each['rows']:,}" for reason, each in found["reasons"].items())
    passed = shares[worst] <= threshold
    return Measured(passed, round(shares[worst], 6), threshold, f"{note}: {why}" if why else note)


def _share(source: dict[str, Any], threshold: float) -> float:
    if source["left_out"] <= 1 and threshold > 0:
        return 0.0
    return float(source["left_out"] / max(1, source["rows"]))
