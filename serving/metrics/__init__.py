"""Counters and histograms: plain numbers that the event loop adds to, and Prometheus' view of them.

Imports serving.admission's types at most. Start at `registry`.
"""
