"""The tiers below a dynamic table: rows in host memory and, in RocksDB, on disk."""
