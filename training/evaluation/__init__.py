"""Validates and tests models, and makes the files that describe them. Runs on every rank."""
