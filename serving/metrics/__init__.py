"""Metrics: counters and histograms as plain numbers, Prometheus' view of them, and sequential tests.

Start at `registry`.
"""
