"""Memory that a worker shares with the servers of its host: inboxes, slots, and parameters that lie in them."""
