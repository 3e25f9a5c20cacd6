"""Validation and test, and the files that they leave. Runs on every rank."""
