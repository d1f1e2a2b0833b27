"""Gradients of looked-up rows, and optimizer steps that apply them in place."""
