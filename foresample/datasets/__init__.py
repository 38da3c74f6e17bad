"""Datasets: many samples into a folder of shards, resumable, by one process or many."""

from foresample.datasets.generation import Dataset, generate, inspect_dataset

__all__ = ["Dataset", "generate", "inspect_dataset"]
