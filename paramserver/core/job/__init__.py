"""A job as a whole: its members, what people are shown of it, whether it gets on, what has been handed in."""
