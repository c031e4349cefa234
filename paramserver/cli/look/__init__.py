"""Commands about a job that runs, or what it has left."""
