"""Parameter groups that a script adds to its optimizer while training runs, and parameters that servers never see."""
