"""The sources of staging: archives and Python environments. Used on the login node and on every node."""
