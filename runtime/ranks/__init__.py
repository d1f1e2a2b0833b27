"""Several ranks: shards of tables, their communication, global statistics, faults."""
