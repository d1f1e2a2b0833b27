"""Dynamic tables: the id table, its rows and optimizer state, eviction, import and export."""
