"""A model's forward as a graph: traced on two batches, with guards for what Python decides."""
