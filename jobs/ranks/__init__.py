"""Starts, watches and stops this node's torchrun and its ranks. Runs on compute nodes."""
