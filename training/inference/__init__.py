"""A trained model without its training: for predict, export and the test."""
