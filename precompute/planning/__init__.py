"""Sizes, memory and times of a night and its service, foretold from a sample of the real inputs.

Start at `forecast`.
"""
