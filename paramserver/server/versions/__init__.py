"""The versions of one shard: contributions that arrive, versions made of them, and answers to readers."""
