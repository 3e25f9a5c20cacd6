"""The commands that a new user needs first."""
