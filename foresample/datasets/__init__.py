"""Datasets: many samples into a folder of shards, resumable, by one process or many."""

from foresample.datasets.dataset import Dataset, inspect_dataset
from foresample.datasets.generation import generate

__all__ = ["Dataset", "generate", "inspect_dataset"]
