"""`paramserver run`: a whole cluster as child processes, started, watched, started again, shown. Used by cli."""
