"""The RPCs of one server, a file for each group of callers."""
