"""The training loop and its parts. Runs on every rank."""
