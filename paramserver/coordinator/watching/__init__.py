"""Looks after a running job: who is lost, late, idle or stuck, and what has to be done when nobody is left."""
