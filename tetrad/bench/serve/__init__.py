"""One run of the load generator."""
