"""The report of a run: one file that says what happened, made of the API's answers."""
