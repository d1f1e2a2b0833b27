"""Recorded optimizer steps of dense parameters, and loss scaling."""
