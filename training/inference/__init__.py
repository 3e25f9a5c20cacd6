"""A trained model outside its training: for predict, export and the test."""
