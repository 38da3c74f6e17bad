"""What the committed result files must show, and which of them are older than the code they measured.

`make results-check` runs `test_results.py` and prints the table of `stale`.
"""
