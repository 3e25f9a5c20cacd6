"""`hpc report`: makes one self-contained HTML page, with CSV tables, about a run or a comparison of several.

Runs on the login node. `hpc.studies` makes the pages of sweeps and scaling studies with this package. No other part
of `hpc` imports Bokeh.
"""
