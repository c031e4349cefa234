"""Objects of the script whose state travels in checkpoints: ``ctx.register``."""
