"""What a night and its service would need, foretold from a sample of the real inputs."""
