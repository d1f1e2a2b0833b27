"""Checkpoints for any number of ranks; the two public functions are in ``api``."""
