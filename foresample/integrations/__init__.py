"""Adapters that bend other people's samplers to the contract of `foresample.Target`."""
