"""The commands about runs that a new user does not need first."""
