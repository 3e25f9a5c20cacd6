"""`hpc logs`: the output of the ranks. Runs on the login node."""
