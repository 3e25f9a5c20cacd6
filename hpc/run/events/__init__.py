"""What happened to a run: typed events, the files that keep them, and what follows from them. Runs everywhere."""
