"""Traces of a job: spans of time, clocks brought together, when a trace is complete, and the file that viewers open."""
