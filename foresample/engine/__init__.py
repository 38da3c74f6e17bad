"""The engine: samples through slots, captured rounds, and the window that is fastest here."""

from foresample.engine.engine import Engine, Sample
from foresample.engine.priors import fit_prior
from foresample.engine.sampling import sample, stream
from foresample.engine.throughput import frontier, pick
from foresample.engine.tuning import Tuning, tune

__all__ = ["Engine", "Sample", "Tuning", "fit_prior", "frontier", "pick", "sample", "stream", "tune"]
