"""Commands that run processes of a job."""
