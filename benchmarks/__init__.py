"""The time that paramserver takes for a piece of work, beside the time of alternatives, in one run."""
