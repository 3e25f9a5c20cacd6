"""Data sets, their loading, and the order of the samples. Runs on every rank."""
