"""Observation of requests: spans, log lines, and `Server-Timing`.

Start at `observer`.
"""
