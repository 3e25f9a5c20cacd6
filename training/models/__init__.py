"""Models by name, their heads, DDP and FSDP, precision, moving averages. Runs on every rank."""
