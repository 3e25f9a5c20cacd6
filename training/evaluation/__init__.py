"""Validation and test, and the files that describe a trained model. Runs on every rank."""
