"""Everything that runs on one machine: the launcher of `paramserver run`, and the processes that it starts."""
