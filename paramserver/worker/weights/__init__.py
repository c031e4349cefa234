"""Weights on their way in: answers to pulls, where they go, and how the script waits for them."""
