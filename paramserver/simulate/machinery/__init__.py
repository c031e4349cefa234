"""Simulated time: events, cores, links, and the parts that are to blame for a wait."""
