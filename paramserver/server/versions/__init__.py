"""The versions of one shard: contributions that arrive, what is made of them, and what readers get."""
