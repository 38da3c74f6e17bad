"""Expectations of the committed result files, and a list of those older than the code they measure.

`make results-check` prints the table of `stale` and runs `test_results.py`; `make test` runs the tests as well.
"""
