"""`hpc report`: makes one self-contained HTML page, with CSV tables, about a run or a comparison of several.

Runs on the login node. No other part of `hpc` imports Bokeh.
"""
