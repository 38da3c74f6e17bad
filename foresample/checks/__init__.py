"""An exactness self-test that users run on their own target and drafter.

Three questions, each answered with numbers:

    rows       Do `start`, `predict` and `mean` process rows independently, and return the same answer every time?
               Their answers along a few paths, at every step, are computed again with other batch-mates
               (`core.look`). A target that mixes rows, draws random numbers or keeps state has no transition
               distribution at all.
    adapted    Does a guess at a step, or the reach of a window, change with states and predictions of later
               steps?
    distribution
               Do speculative and sequential samples have the same distribution? Kolmogorov–Smirnov tests along the
               chain: random projections and norms of states, of increments (the joint distribution of consecutive
               states), and innovations (x_{k+1} − mean_k(x_k))/std_k, which must be N(0, I) and independent of x_k.

The first two compare numbers, and their power does not depend on how many samples are drawn. The distribution tests
share one false-alarm level: a correct sampler fails them with at most that probability. They also state the size of
an error that this number of samples would reveal.

A network that returns another quantity than declared (such as a score instead of x0) is still sampled exactly, but its
samples are worthless. A note reports a network that does not find the noise added to its samples.
"""

from foresample.checks.exactness import check
from foresample.checks.findings import Check, Finding

__all__ = ["Check", "Finding", "check"]
