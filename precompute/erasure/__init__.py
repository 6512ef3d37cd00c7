"""Erasure of an entity: which generations and hosts still hold it, and what is done until none does.

Start at `erasing`.
"""
