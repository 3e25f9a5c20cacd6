"""Saves a training's state as durable checkpoints and as snapshots in memory, and restores it. Runs on every rank."""
