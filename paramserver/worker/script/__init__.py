"""The script's objects: model, optimizer, loader, schedules, and what is watched on them."""
