"""Who leads: the election, the written record, and how a new leader takes a job over."""
