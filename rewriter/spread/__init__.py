"""One model over many ranks: its plan, its graphs, its tables."""
