"""The training script's side: context, loader, optimizer, and the client for those without a module."""
