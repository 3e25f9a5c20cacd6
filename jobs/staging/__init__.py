"""Stages the data set and the Python environment on this node's own disk. Runs on compute nodes."""
