"""How messages travel: one interface, an implementation for one process and one for gRPC."""
