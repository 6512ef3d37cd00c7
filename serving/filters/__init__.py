"""Filters in the service: filtered and re-ranked lists, searched again by vectors if too few items pass.

Start at `filtered_lookup`.
"""
