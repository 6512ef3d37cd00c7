"""A team's Parquet and CSV files as columns: ids, features, times, interactions, and the rows that nobody can use.

Start at `readers`.
"""
