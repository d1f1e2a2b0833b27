"""Gradients of a replayed backward: where they end, and in whose memory."""
