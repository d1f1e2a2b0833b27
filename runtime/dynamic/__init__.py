"""Tables without end: a C++ id table, its rows and optimizer state, eviction, import and export."""
