"""Writes metrics, events and results. Runs on every rank; rank 0 writes."""
