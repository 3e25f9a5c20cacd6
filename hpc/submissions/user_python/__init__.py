"""The Python in which a run's ranks start: the user's own environment, or an archive of the environment of hpc."""
