"""Messages about a run: to whom, about what, sent once. Runs on compute nodes and on the login node."""
