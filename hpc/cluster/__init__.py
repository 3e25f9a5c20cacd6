"""Examines a cluster, causes failures on it on purpose, and runs a small cluster on this machine, for developers."""
