"""Weights & Biases and MLflow: a run's metrics, sent from its directory, by a compute node or the login node."""
