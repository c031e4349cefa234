"""Which worker, server or link made a step wait, for how long, and why. See docs/blame.md."""
