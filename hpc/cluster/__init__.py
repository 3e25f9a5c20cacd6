"""The cluster itself: what examines it, what breaks it on purpose, and a small one on this machine, for developers."""
