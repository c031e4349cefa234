"""The data as work: slices, who gets which, what is done, how far a script is."""
