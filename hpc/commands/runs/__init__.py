"""The other commands about runs."""
