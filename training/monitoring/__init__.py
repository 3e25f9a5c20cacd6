"""Metrics, events and TensorBoard. Runs on rank 0."""
