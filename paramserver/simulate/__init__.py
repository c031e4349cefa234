"""A cluster under a virtual clock: the real cores, with simulated links, costs and stragglers."""
