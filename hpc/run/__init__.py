"""A run as data: its directory, its settings, its events and the history that they make. Runs anywhere."""
