"""Helpers that several tests share: chains, pipelines, policies and packages to test with."""
