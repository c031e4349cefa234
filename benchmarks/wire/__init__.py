"""Two processes of one machine, and the ways in which bytes can travel between them."""
