"""Fewer bytes for weights and gradients: how numbers are rounded, thinned out, and read again. Pure functions.

A *compressor* turns the numbers of one chunk into a payload, and gives at once the numbers that a reader will decode. A
worker puts these in place of its own, so that all paths carry the same numbers. Compressors know no steps, workers or
servers.
"""
