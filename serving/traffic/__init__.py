"""Traffic split by key: canaries and experiments, the arm of each request, and its counts.

Start at `attach`.
"""
