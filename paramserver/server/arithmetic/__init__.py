"""Sums and updates: contributions added up in the fixed order, optimizers applied to chunks."""
