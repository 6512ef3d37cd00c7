"""Admission control: which requests are taken when there are too many (CoDel), and which come too late.

Start at `controller`.
"""
