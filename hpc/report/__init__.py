"""`hpc report`: one self-contained HTML page for a run, or for a comparison of several, and CSV tables beside it.

Runs on the login node. The only package of `hpc` that may import pandas and Bokeh.
"""
