"""The data as work: slices, their distribution over workers, finished slices, the progress of a script."""
