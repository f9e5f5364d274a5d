"""One folder per op: contract (no torch), reference (plain torch), check, and backends."""
