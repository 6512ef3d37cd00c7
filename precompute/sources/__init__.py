"""Readers of Parquet and CSV source files: ids, features, times, interactions, and counts of unusable rows.

Start at `readers`.
"""
