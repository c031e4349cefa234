"""Several models in one job, each with an optimizer of its own, which step in turn on each batch."""
