"""Fewer bytes for weights and gradients: how numbers are rounded, thinned out, and read again. Pure functions of them.

A *compressor* turns the numbers of one chunk into a payload, and says at once what a reader will make of it, so that a
worker can put that in their place: then all paths carry the same numbers. Nothing here knows steps, workers or servers.
"""
