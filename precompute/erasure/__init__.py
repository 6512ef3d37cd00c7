"""Erasure of an entity: the generations and hosts that still hold it, and the steps until none does.

Start at `erasing`.
"""
