"""`hpc drill`: cause a failure in a run and measure its cost. Runs on the login node."""
