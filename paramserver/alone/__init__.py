"""A whole job in one process, for scripts without a configured cluster. Used by the API and by tests."""
