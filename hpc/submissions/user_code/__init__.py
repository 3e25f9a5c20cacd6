"""The user's code: which files a run copies and which it links, the copy itself, and its renewal by `hpc resume`."""
