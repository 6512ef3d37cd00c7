"""Sequential test of whether answers have stopped being what the model says; may be looked at after each sample.

Hypothesis: whatever came before, a sample's overlap is at least `floor` in the mean. Against it a bet is laid on every
sample x in [0, 1]: the capital grows by 1 + stake * (floor - x), which is fair at best where the hypothesis holds
(Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86(1), 2024). Answers may go
bad at any moment, so a share 1/(t*(t+1)) of the first capital is kept back for a bet that begins at sample t, which
makes a Shiryaev-Roberts statistic of it whose expectation never exceeds 1 (Shin, Ramdas & Rinaldo, "E-detectors",
2023). By Ville's inequality the capital ever reaches 1/alpha with a chance of alpha at most, however long it runs and
whatever the overlaps are distributed like. No table of numbers, no window, two floats per stake.
"""

from dataclasses import dataclass, field

ALPHA = 1e-4
"""Chance of a false alarm, in all of a generation's life and over all tables of one process together."""

_STAKES = (0.1, 0.3, 0.6)
"""Stakes as parts of the largest that cannot lose everything: small ones find a small drift, large ones a large one."""


@dataclass(slots=True)
class Drift:
    """Drift test of one table of one release; `alpha` is its own part. An alarm stays."""

    floor: float
    alpha: float
    samples: int = 0
    found_after: int | None = None
    _capital: list[float] = field(default_factory=lambda: [0.0] * len(_STAKES))

    def saw(self, overlap: float) -> bool:
        """Adds a sample's overlap; returns whether the alarm is raised."""
        self.samples += 1
        reserved_capital = 1.0 / (self.samples * (self.samples + 1))
        largest_stake = 1.0 / max(1.0 - self.floor, 0.05)
        limit = 1.0 / self.alpha
        for at, stake in enumerate(_STAKES):
            grown = (self._capital[at] + reserved_capital) * (
                1.0 + stake * largest_stake * (self.floor - overlap)
            )
            self._capital[at] = min(grown, 2 * len(_STAKES) * limit)
        if self.found_after is None and self.evidence >= limit:
            self.found_after = self.samples
        return self.is_found

    @property
    def evidence(self) -> float:
        """The capital: 1 says nothing, 1/alpha raises the alarm."""
        return sum(self._capital) / len(self._capital)

    @property
    def is_found(self) -> bool:
        """True if the evidence ever was enough for an alarm."""
        return self.found_after is not None
