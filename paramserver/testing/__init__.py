"""Means to test training programs and paramserver itself: faults that are planned, fire, and are counted."""
