"""Near-match reuse: what live found for an input serves one close by, while its error is shown to be below a bound.

Imports serving.generations, serving.sequential and the rooms below them. Start at `near_matches`.
"""
