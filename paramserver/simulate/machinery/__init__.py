"""Simulated time: events, cores, links, and what is to blame for a wait."""
