"""The command `larder`, over all others: it finds the settings, and hands over to the module whose command it is.

Start at `commands`.
"""
