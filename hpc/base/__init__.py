"""The base of all three packages, which knows nothing of runs: files, units, errors, processes. Runs anywhere."""
