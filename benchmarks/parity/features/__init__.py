"""The rows of docs/parity.md, a file for each subject."""
