"""`hpc status`: what a run is doing, what it lost, what to do about it. Runs on the login node."""
