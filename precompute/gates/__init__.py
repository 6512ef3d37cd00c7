"""Gates: what a generation must prove before it may be published.

The rules lie in `rules`, what they look at in `evidence`. Start at `judge`.
"""
