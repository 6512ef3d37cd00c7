"""Sequential statistics: bounds and alarms that may be looked at after every sample, and still hold. Pure.

Imports nothing of ours. Start at `error_rate`.
"""
