"""Explanation of one answer: the sources read for an entity, the result of each, and the record itself.

Start at `explainer`.
"""
