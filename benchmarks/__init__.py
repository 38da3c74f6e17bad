"""Benchmarks: scripts that save their results, with command, commit, versions and machine, under results/."""
