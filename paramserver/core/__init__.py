"""Everything that decides, and nothing that acts: pure functions and state machines over names, versions and sizes.

The core imports the standard library only, and from it no clock, random source, environment, asyncio or logging. What
it needs to know comes in as arguments; tensors never do.
"""
