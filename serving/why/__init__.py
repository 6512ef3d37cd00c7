"""Finding out why: what a request went through, for headers, logs and spans, and what an entity's answer comes from."""
