"""Common ground of writer and reader: stored bytes, the two tiers, and the one live path.

Start at `format` and `tiers`.
"""
