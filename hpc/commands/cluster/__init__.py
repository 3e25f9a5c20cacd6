"""The commands about the cluster, this machine, and the user's settings."""
