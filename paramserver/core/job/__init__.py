"""A job as a whole: its members, its status, its progress, and the tallies at its end."""
