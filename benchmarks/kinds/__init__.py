"""The kinds of result files, by topic. Importing this package makes all of them known to `result_files`."""

from benchmarks.kinds import calls, clock, datasets, packages, quality, rivals, robots

__all__ = ["calls", "clock", "datasets", "packages", "quality", "rivals", "robots"]
