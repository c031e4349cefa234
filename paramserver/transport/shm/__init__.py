"""Two processes of one host: memory that both map, and calls over a socket that they have handed over."""
