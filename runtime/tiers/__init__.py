"""Rows of dynamic tables on disk, under those in memory: by RocksDB, a record for each row."""
