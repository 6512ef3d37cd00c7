"""Admission control: which requests are taken when there are too many (CoDel), and which come too late.

Imports serving.requests. Start at `controller`.
"""
