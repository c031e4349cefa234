"""Several optimizer steps on each batch, the turns: whose turn it is, and which steps a job has. Pure."""
