"""Weights & Biases and MLflow: sending a run's metrics from its directory, on a compute node or the login node."""
