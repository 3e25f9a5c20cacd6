"""`hpc report`: makes one self-contained HTML page, with CSV tables, about a run or a comparison of several.

Runs on the login node. Within `hpc`, only this package and the two packages whose pages it makes, `hpc.studies.sweep`
and `hpc.studies.scaling`, import pandas and Bokeh.
"""
