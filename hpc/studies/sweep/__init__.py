"""`hpc sweep`: many runs with different values of some flags, which Optuna chooses. Runs on the login node."""
