"""Gates: rules that a generation must pass before it may be published.

The rules are in `rules`, their evidence in `evidence`. Start at `judge`.
"""
