"""What a worker knows of its job: membership, mode, data, servers, its own progress. For the packages of the worker."""
