"""Usage: the most requested ids, and miss-ratio curves of L1 from a sample of its reads.

Start at `miss_ratio_curve`.
"""
