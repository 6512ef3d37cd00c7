"""Near-match reuse: live answers are reused for similar inputs, while their error is shown to be below a bound.

Start at `near_matches`.
"""
