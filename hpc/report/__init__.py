"""`hpc report`: one HTML page, with CSV tables, about a run or several. Login node; no other room imports Bokeh."""
