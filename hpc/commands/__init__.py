"""The commands, a file each, in the groups that `hpc help` shows; and the same for Python. Runs on the login node."""
