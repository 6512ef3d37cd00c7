"""Evaluation of lists against what users did next, replayed from a log.

Start at `freshness`.
"""
