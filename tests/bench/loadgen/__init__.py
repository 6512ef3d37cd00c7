"""A bench whose load comes from MLPerf's load generator."""
