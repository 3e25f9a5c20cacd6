"""Owns the data sets, their loading, and the order of their samples. Runs on every rank."""
