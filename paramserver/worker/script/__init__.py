"""The script's objects: model, optimizer, loader, schedules, and the checks on them."""
