"""Certificates, tokens, and the rule that says which role may call which method."""
