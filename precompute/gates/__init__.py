"""Gates: the proofs that a generation needs before it may be published.

The rules are in `rules`, their evidence in `evidence`. Start at `judge`.
"""
