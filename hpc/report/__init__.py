"""`hpc report`: one self-contained HTML page for a run, or for a comparison of several, and CSV tables beside it.

Runs on the login node. Of `hpc`, only this package and those whose pages it makes, `hpc.sweep` and `hpc.scaling`,
import pandas and Bokeh.
"""
