"""Requests under observation: their spans, their lines in the log, and `Server-Timing`.

Start at `observer`.
"""
