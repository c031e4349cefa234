"""A cluster under a virtual clock: the real cores, with links, costs and stragglers that are only imagined."""
