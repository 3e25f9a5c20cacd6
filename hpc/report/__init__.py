"""`hpc report`: one self-contained HTML page for a run, or for a comparison of several, and CSV tables beside it.

Runs on the login node. `gather` reads a run; `page` fills the templates from it; `plots` draws the figures.
The only package of `hpc` that may import pandas and matplotlib.
"""
