"""`hpc doctor`: settings of a cluster that cost runs work or time. Runs on the login node."""
