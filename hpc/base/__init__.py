"""Foundation of hpc, jobs and training that knows nothing of runs: files, units, errors, processes. Runs everywhere."""
