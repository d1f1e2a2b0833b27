"""Layers beside lookups, interactions and chains: gates, attention, recurrence, Dice."""
