"""Leadership: the election, the record in the store, and how a new leader takes a job over."""
