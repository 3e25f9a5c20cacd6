"""The library of `hpc submit`: checks a run, makes its directory, and queues it. Runs on the login node."""
