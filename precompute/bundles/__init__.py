"""Bundles: a team's or the reference models with their vocabulary, their int8 forms, and the index made from them.

Start at `bundle`.
"""
