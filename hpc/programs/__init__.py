"""The kinds of programs that a run can have: a script of the user, and the image classifier. Runs on the login node."""
