"""Ours against every other way to train the same model on a CPU: ``python benchmarks/peers``."""
