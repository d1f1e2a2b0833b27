"""Gradients of touched rows, and the optimizer steps that take them in place."""
