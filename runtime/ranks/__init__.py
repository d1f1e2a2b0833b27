"""Many devices: shards of tables, what goes over the wire, global statistics, faults."""
