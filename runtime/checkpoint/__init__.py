"""Checkpoints that fit any number of ranks; ``api`` has the two functions."""
