"""Saved state: capture, durable checkpoints, snapshots in memory, restore. Runs on every rank."""
