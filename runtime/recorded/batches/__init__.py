"""Batches as recordings see them: their form, and the fixed memory that they are copied into."""
