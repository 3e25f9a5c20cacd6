"""The Python in which a run's ranks start: the user's environment, its archive, the imports of the script."""
