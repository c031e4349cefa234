"""A worker's knowledge of its job: membership, mode, data, servers, its progress. For the packages of the worker."""
