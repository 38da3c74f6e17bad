"""An exactness self-test that users run on their own target and drafter.

Three questions, each answered with numbers:

    rows       Do `start`, `predict` and `mean` treat rows independently, and answer the same when asked the same?
               What they answered along a few paths, at every step, is asked for again with other batch-mates
               (`core.look`). A target that mixes rows, draws random numbers or keeps state has no transition
               distribution at all.
    adapted    Does a guess at a step, or how far a window reaches, change when states and predictions of later
               steps do?
    distribution
               Do speculative and sequential samples have the same distribution? Kolmogorov–Smirnov tests along the
               chain: random projections and norms of states, of increments (the joint distribution of consecutive
               states), and innovations (x_{k+1} − mean_k(x_k))/std_k, which must be N(0, I) and independent of x_k.

The first two compare numbers, and their power does not depend on how many samples are drawn. The distribution tests
share one false-alarm level: a correct sampler fails them with at most that probability. They also say which error so
many samples would have shown.

A network that does not return what was promised (a score for x0, say) is sampled exactly all the same, and its samples
are worth nothing: where noise put into them is not found again, a note says so.
"""

from foresample.checks.exactness import check
from foresample.checks.findings import Check, Finding

__all__ = ["Check", "Finding", "check"]
