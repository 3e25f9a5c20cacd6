"""Checks and measures a cluster, causes the failures of drills, and runs a small Slurm cluster on this machine."""
