"""`hpc sweep`: many runs with other values of some flags, chosen by Optuna. Runs on the login node."""
