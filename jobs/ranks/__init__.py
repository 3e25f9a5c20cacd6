"""Starts, watches and stops this node's torchrun and its ranks. Runs on compute nodes."""

WRAPPER = "wrapper"
"""The name of the processes that run jobs.ranks.process_wrapper."""
