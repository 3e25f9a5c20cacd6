"""Helpers that several test files use; each module says in its first line what it offers."""
