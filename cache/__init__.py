"""What writer and reader agree on: keys, records, directory, manifest, the two tiers and the one live path."""
