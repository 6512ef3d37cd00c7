"""The night: score every known entity, check the result, load it and publish it as one generation."""
