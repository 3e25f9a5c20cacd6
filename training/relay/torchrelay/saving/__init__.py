"""Saves and restores the state of a training: in each node's memory, and as checkpoints. Runs on every rank."""
