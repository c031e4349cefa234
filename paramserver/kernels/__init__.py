"""Arithmetic that torch has no kernels for: C, compiled when the package is installed (see hatch_build.py)."""
