"""Messages as values of the core and back, and the bounds on what a message may ask for.

Imports core, tensors and v1. Used by membership and the roles.
"""
