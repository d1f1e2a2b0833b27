"""The gradients of a replayed backward: how they reach the weights, and in which memory."""
