"""Batches as recordings take them: their form, and the fixed memory that they are copied into."""
