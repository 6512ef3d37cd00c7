"""Findings of people who tried the product, each with the test that keeps it mended.

A `.tsv` file has a line for each: what was found, and the test, or `none:` and why there is none.
"""
