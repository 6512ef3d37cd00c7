"""Builds: a generation while a night makes it, with its files, reports, tables and seal.

Start at `build`.
"""
