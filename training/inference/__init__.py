"""Trained models outside their training, for predict, export and the test."""
