"""What paramserver takes for a piece of work, beside what others take for the same, in the same run."""
