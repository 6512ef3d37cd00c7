"""The command `larder`: finds the settings and calls the module of the subcommand. Start at `commands`."""
