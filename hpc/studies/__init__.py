"""Runs that belong together, in one directory: the trials of a sweep, the sizes of a scaling study."""
