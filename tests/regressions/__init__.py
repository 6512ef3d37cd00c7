"""Findings of people who tried the product, each with the test that keeps it from coming back.

A `.tsv` file has a line for each: what was found, and the test, or `none:` and why there is none.
"""
