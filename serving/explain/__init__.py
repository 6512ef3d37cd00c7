"""Explanation of one answer: the sources read for an entity, the result of each, and the stored record.

Start at `explainer`.
"""
