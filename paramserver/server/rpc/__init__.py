"""The RPCs of one server, a file for each of those who call it."""
