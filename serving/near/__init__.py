"""Near-match reuse: what live found for an input serves one close by, while its error is shown to be below a bound.

Start at `near_matches`.
"""
