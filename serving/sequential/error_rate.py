"""Bounds of an error rate from samples that were right or wrong; they may be looked at after each sample. Pure.

For a weight w, each sample x in {0, 1} multiplies a capital by w**x / (1 - p + p*w), which is fair if p is the chance
that it is wrong, whatever came before. By Ville's inequality the capital ever reaches 1/alpha with a chance of alpha at
most. log(1 - p + p*w) is concave in p, so the bound that follows holds for the mean of the chances of all samples so
far, however they changed: no rate that stays, no independence, no number of samples said beforehand (Howard, Ramdas,
McAuliffe & Sekhon, "Time-uniform Chernoff bounds via nonnegative supermartingales", Probability Surveys 17, 2020).
Several weights share alpha, and the best of them counts; weight 0 is for no error at all.
"""

import math

_BELOW = (0.0, 0.1, 0.3, 0.5, 0.7)
_ABOVE = (1.5, 3.0, 10.0, 40.0, 200.0)


def highest(samples: int, wrong: int, alpha: float) -> float:
    """The highest that the mean chance may be; too low at any moment, ever, with a chance of `alpha` at most."""
    if not samples:
        return 1.0
    evidence = math.log(len(_BELOW) / alpha)
    bounds = [1.0]
    for weight in _BELOW:
        if weight or not wrong:
            grown = wrong * math.log(weight) if wrong else 0.0
            bounds.append((1.0 - math.exp((grown - evidence) / samples)) / (1.0 - weight))
    return min(bounds)


def lowest(samples: int, wrong: int, alpha: float) -> float:
    """The lowest that the mean chance may be; too high at any moment, ever, with a chance of `alpha` at most."""
    if not wrong:
        return 0.0
    evidence = math.log(len(_ABOVE) / alpha)
    bounds = [
        math.expm1((wrong * math.log(weight) - evidence) / samples) / (weight - 1.0)
        for weight in _ABOVE
    ]
    return max(0.0, *bounds)
