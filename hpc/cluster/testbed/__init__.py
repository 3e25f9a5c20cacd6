"""A real Slurm on one machine: `hpc testbed up`. Runs as root on that machine."""
