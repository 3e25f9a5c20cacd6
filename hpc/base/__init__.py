"""Files, units, errors and processes for hpc, jobs and training. Knows nothing of runs. Runs everywhere."""
