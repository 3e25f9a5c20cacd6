"""The findings of `hpc doctor` about a cluster, its nodes and a run. Runs on the login node."""
