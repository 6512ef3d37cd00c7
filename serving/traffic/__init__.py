"""Traffic split by key: canaries and experiments, which of them answers a request, and what is counted of it.

Start at `attach`.
"""
