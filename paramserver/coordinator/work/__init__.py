"""What there is to do: leases of slices, what has counted, and changes of the mode."""
