"""Traffic: canaries, which try a generation on a share of the requests, and experiments, whose arms run for weeks.

Start at `canary` and `experiments`.
"""
