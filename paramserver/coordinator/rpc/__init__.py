"""The calls that a coordinator answers: a file for each kind of caller. `coordinator.service` holds them."""
