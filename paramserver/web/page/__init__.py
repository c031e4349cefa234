"""The page in the browser: its files, and the page as one file with the data inside."""
