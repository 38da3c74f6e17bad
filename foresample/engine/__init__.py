"""The engine: samples through slots, captured rounds, and the window that is fastest here."""

from foresample.engine.engine import Engine, Sample
from foresample.engine.priors import fit_prior
from foresample.engine.sampling import sample, stream
from foresample.engine.tuning import Frontier, Tuning, tune

__all__ = ["Engine", "Frontier", "Sample", "Tuning", "fit_prior", "sample", "stream", "tune"]
