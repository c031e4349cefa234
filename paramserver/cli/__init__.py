"""The command line: printing, exit codes and logging setup live here and nowhere else."""
