"""`larder init`: inspects files of interactions and features, guesses their columns, and writes a `larder.toml`."""
