"""The commands for existing runs, and for several runs at once. A new user does not need them first."""
