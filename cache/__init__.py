"""Code that both the night and the service use: stored bytes, the two tiers, and the live path.

Start at `format` and `tiers`.
"""
