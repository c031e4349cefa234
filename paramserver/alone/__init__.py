"""A whole job in one process: what a script gets where no cluster is configured. Used by the API and by tests."""
