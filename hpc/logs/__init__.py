"""`hpc logs`: what the ranks printed. Runs on the login node."""
