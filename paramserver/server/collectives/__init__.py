"""Collectives of process groups: what ranks bring is reduced here, in the order of ranks."""
