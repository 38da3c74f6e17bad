"""What the committed result files must show, and which of them are older than the code they measure.

`make results-check` prints the table of `stale` and runs `test_results.py`; `make test` runs the tests as well.
"""
