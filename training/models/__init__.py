"""Builds models and prepares them for training: heads, DDP and FSDP, precision, averages. Runs on every rank."""
