"""`hpc report`: one self-contained page for a run, or for a comparison of several, and tables beside it.

Runs on the login node. `gather` reads a run; everything else makes text of what was read: `page` and `compare` are the
two kinds of page, `results` and `parts` what they consist of, `plots` and `svg` the figures, `tables` the CSV files.
The only package of `hpc` that may import pandas and matplotlib.
"""
