"""Messages about a run: their occasions, recipients and delivery. Runs on compute nodes and on the login node."""
