"""`hpc report`: make one self-contained HTML page for a run or for a comparison of several, with CSV tables.

Runs on the login node. Within `hpc`, only this package and the two packages whose pages it makes, `hpc.studies.sweep`
and `hpc.studies.scaling`, import pandas and Bokeh.
"""
