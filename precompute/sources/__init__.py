"""Readers of a team's Parquet and CSV files: ids, features, times, interactions, and counts of unusable rows.

Start at `readers`.
"""
