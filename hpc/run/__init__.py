"""A run as data: its directory, its settings, its events, and the history derived from them. Runs everywhere."""
