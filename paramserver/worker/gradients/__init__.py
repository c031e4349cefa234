"""Gradients on their way out: backward hooks, what a contribution consists of, when its parts may leave."""
