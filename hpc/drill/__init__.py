"""`hpc drill`: break a run on purpose and measure what that costs. Runs on the login node."""
