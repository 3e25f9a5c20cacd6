"""`hpc status`: the state of runs, their losses, and advice. Runs on the login node."""
