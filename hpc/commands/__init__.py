"""The commands, a file each, in the groups that `hpc help` shows, and the Python API. Runs on the login node."""
