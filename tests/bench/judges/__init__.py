"""Instruments that others wrote, in an environment of their own."""
