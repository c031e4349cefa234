"""The values of ``ctx.log`` on their way out of the coordinator: a file of JSON lines, and trackers of experiments."""
