"""The work of a job: leases of slices, the slices that have counted, and changes of the mode."""
