"""Reads standard input, and prints what comes."""

import sys

print("reads", sys.stdin.read().split(), flush=True)
