"""Traffic split by key: canaries here, experiments in a package of their own.

Start at `canary`.
"""
