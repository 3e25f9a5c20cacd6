"""`hpc doctor`: what in this cluster's configuration will hurt a run. Runs on the login node."""
