"""Evaluation of lists against users' later interactions, replayed from a log.

Start at `freshness`.
"""
