"""Sends a run's metrics from its directory to Weights & Biases or MLflow, on a compute node or the login node."""
