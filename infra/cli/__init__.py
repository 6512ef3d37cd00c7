"""The command `larder`, over all others: it finds the settings, and hands over to the module whose command it is.

Imports serving, precompute and infra.demo where a command runs, never before. Start at `commands`, then `__main__`.
"""
