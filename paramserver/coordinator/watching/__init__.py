"""Parts that look after a running job: lost, stalled, idle and stuck members, and the end of the job."""
