"""Admission control under overload (CoDel), deadline checks before work begins, and pacing of the event loop.

Start at `controller`.
"""
