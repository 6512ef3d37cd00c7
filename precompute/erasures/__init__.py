"""Erasures as they are written down, and the records of hosts that hold copies.

Imports sources. Start at `erasure`.
"""
