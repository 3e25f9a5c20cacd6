"""The commands, one file each, in the groups of `hpc help`, and the Python API. Runs on the login node."""
