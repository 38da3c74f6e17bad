"""The engine: samples through slots, captured rounds, and the window that is fastest here."""

from foresample.engine.engine import Engine, Sample, sample, stream
from foresample.engine.priors import fit_prior
from foresample.engine.tuning import Frontier, Tuning, tune

__all__ = ["Engine", "Frontier", "Sample", "Tuning", "fit_prior", "sample", "stream", "tune"]
