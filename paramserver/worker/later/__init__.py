"""Parameter groups that a script adds to its optimizer while training runs."""
