"""Chains of linear layers with their activations, batch norms and dropout."""
