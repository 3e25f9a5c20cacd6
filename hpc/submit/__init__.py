"""`hpc submit`: check a run, make its directory, queue it. Runs on the login node."""
