"""Filters by day: lists of the items that pass, in another order if asked, searched again if too few pass.

Start at `filtered_lookup`.
"""
