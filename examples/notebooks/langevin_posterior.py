# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A posterior by Langevin
#
# After this notebook you can sample a posterior with Langevin dynamics in fewer gradients one after another.
#
# Langevin dynamics x ← x + h ∇log p(x) + √(2h) z is a chain of Gaussian transitions, so its steps can be drafted and
# checked like those of a diffusion sampler. Here: the posterior of a Bayesian logistic regression.
#
# The samples have exactly the distribution of *this chain* with its step size: speculation adds no bias, and does not
# remove the bias of the chain. Needs `pip install foresample matplotlib`.

# %%
from statistics import median
from time import perf_counter

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import foresample as fs

generator = torch.Generator().manual_seed(0)

# %% tags=["parameters"]
steps, count, window, turns = 400, 500, 20, 11
check_samples = 1000

# %% [markdown]
# ## A posterior
#
# 200 observations, 5 coefficients, a standard normal prior. The score of many states at once is one matrix product;
# each row is processed independently.

# %%
truth = torch.tensor([1.5, -1.0, 0.5, 0.0, -0.5], dtype=torch.float64)
features = torch.randn(200, 5, generator=generator, dtype=torch.float64)
labels = (torch.rand(200, generator=generator, dtype=torch.float64) < torch.sigmoid(features @ truth)).double()


def score(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
    """∇ log posterior, [B, 5]."""
    return (labels - torch.sigmoid(x @ features.T)) @ features - x


# %% [markdown]
# ## The chain

# %%
target = fs.targets.langevin(score, (5,), step_size=2e-3, steps=steps, dtype=torch.float64)
checked = fs.check(target, window=window, samples=check_samples)
print(checked)
assert checked.passed

# %%
plain = fs.sequential(target, count, seed=0)
run = fs.sample(target, count, window=window, seed=1)
print(f"{run.report.calls_mean:.1f} gradients one after another instead of {steps}: {run.speedup:.2f}× fewer")

# %% [markdown]
# ## How long one chain takes
#
# Both samplers run one chain in turns.

# %%
engine = fs.Engine(target, window=window, slots=1)
samplers = {
    "sequential": lambda: fs.sequential(target, 1, seed=0),
    "speculative": lambda: engine.sample([0]),
}
times: dict[str, list[float]] = {name: [] for name in samplers}
for _ in range(turns):
    for name, draw in samplers.items():
        began = perf_counter()
        draw()
        times[name].append(1000 * (perf_counter() - began))
first, second = (median(times[name][1:]) for name in samplers)  # the first turn warms up
print(f"one chain: {first:.1f} ms sequentially, {second:.1f} ms speculatively ({first / second:.2f}×)")

# %% [markdown]
# ## The same posterior
#
# Means and standard deviations of both, each with its standard error; the mode stands beside them.

# %%
mode = torch.zeros(1, 5, dtype=torch.float64)
for _ in range(2000):
    mode = mode + 5e-3 * score(mode, torch.zeros(1), torch.zeros(1))
error = plain.samples.std(0) / count**0.5
for i in range(5):
    one, two = plain.samples[:, i], run.samples[:, i]
    print(
        f"coefficient {i}: mode {mode[0, i]:+.3f}, "
        f"sequential {one.mean():+.3f} ± {error[i]:.3f} (std {one.std():.3f}), "
        f"speculative {two.mean():+.3f} ± {error[i]:.3f} (std {two.std():.3f})"
    )
distance = (plain.samples.mean(0) - run.samples.mean(0)).abs() / (2**0.5 * error)
assert float(distance.max()) < 5

# %%
figure, axes = plt.subplots(1, 5, figsize=(14, 2.6), sharey=True)
for i, ax in enumerate(axes):
    both = [plain.samples[:, i].numpy(), run.samples[:, i].numpy()]
    ax.hist(both, bins=25, histtype="step", density=True, color=["gray", "crimson"])
    ax.axvline(float(truth[i]), color="black", linewidth=0.8)
    ax.set(title=f"coefficient {i}")
plt.show()

# %% [markdown]
# ## The chain's own bias
#
# A coarser step makes a worse chain, for both samplers alike: the spread of its samples is off, and speculation keeps
# exactly that.

# %%
coarse = fs.targets.langevin(score, (5,), step_size=2e-2, steps=max(20, steps // 10), dtype=torch.float64)
for name, drawn in (
    ("sequential", fs.sequential(coarse, count, seed=2)),
    ("speculative", fs.sample(coarse, count, window=window, seed=3)),
):
    print(
        f"{name:12} std of coefficient 0: {drawn.samples[:, 0].std():.3f}, fine chain {plain.samples[:, 0].std():.3f}"
    )
