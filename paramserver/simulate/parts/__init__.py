"""The simulated cluster: hosts, servers, and workers in both modes."""
