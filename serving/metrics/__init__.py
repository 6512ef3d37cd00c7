"""Metrics: counters and histograms as plain numbers, their exposition for Prometheus, and sequential tests.

Start at `registry`.
"""
