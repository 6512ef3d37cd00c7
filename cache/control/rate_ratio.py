"""Interval of a ratio of rates that holds at every look at once: whoever looks each hour is not fooled more. Pure.

Events are Poisson counts, so the logarithm of the ratio of two rates has about the variance v = 1/a + 1/b. Mixed over
effects of a normal distribution with the deviation `EFFECT`, the likelihood ratio is a martingale where the ratio is
the true one, and exceeds 1/alpha with at most the probability alpha, ever (Robbins, "Statistical methods related to the
law of the iterated logarithm", 1970; Johari, Koomen, Pekelis and Walsh, "Always valid inference", 2022). Events of one
key that hang together vary more than that.
"""

import math
from typing import NamedTuple

EFFECT = 0.1
"""Deviation of the logarithm of a ratio for which intervals are shortest: effects of about 10 %."""

ALPHA = 0.05


class RateRatio(NamedTuple):
    """Rate of one arm over that of another, with the bounds that hold at all looks with probability 1 - alpha."""

    ratio: float
    low: float
    high: float


def rate_ratio(
    events: float, requests: float, base_events: float, base_requests: float, alpha: float = ALPHA
) -> RateRatio | None:
    """Events per request over those of a base; None while either has none: then nothing bounds the ratio."""
    if min(events, requests, base_events, base_requests) <= 0:
        return None
    ratio = (events / requests) / (base_events / base_requests)
    variance, effect = 1 / events + 1 / base_events, EFFECT * EFFECT
    spread = 1 + effect / variance
    wide = math.sqrt(
        variance * spread / (effect / variance) * (math.log(spread) - 2 * math.log(alpha))
    )
    return RateRatio(ratio, ratio * math.exp(-wide), ratio * math.exp(wide))
