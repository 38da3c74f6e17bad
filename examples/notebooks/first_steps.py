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
# # First steps
#
# After this notebook you can draw pictures with both samplers, time them, and check that their distributions agree.
#
# A diffusion sampler calls its network once for every step. `foresample` drafts a window of steps, checks them with
# one call, and keeps or corrects them so that the samples have **exactly** the sequential sampler's distribution.
#
# Needs `pip install 'foresample[models,cli]'`. Nothing is downloaded: a small Fashion-MNIST model is in the package.

# %%
from statistics import median
from time import perf_counter

import matplotlib.pyplot as plt

import foresample as fs

# %% tags=["parameters"]
count, steps, window, turns = 12, 100, 8, 6
check_samples = 1000

# %% [markdown]
# ## A target
#
# A *target* is a chain of Gaussian transitions: coefficients and a network. This one walks the embedded model's DDPM
# chain, its classes in turn.

# %%
model = fs.pretrained.load()
target = model.target(steps)
print(f"{len(target.std)} steps of states {tuple(target.shape)}; classes {', '.join(model.labels)}")

# %% [markdown]
# ## Both samplers
#
# `fs.sequential` is the baseline. The two samplers draw different samples from one distribution.

# %%
plain = fs.sequential(target, count, seed=0)
run = fs.sample(target, count, window=window, seed=0)
print(run.report)

# %%
figure, rows = plt.subplots(2, count, figsize=(count, 2.2))
for axes, one in zip(rows, (plain, run), strict=True):
    for ax, picture in zip(axes, one.samples, strict=True):
        ax.imshow(picture[0], cmap="gray", vmin=-1, vmax=1)
        ax.axis("off")
figure.suptitle(
    f"{plain.calls.double().mean():.0f} calls a sample above, {run.calls.double().mean():.1f} below"
)
plt.show()

# %% [markdown]
# ## How long one picture takes
#
# Both samplers draw one picture in turns. Speculation makes fewer calls, each with more states: it is faster where a
# call on nine states takes less than nine times as long. Twelve pictures at a time already fill a CPU core, so there
# the sequential sampler is faster; `fs.tune` measures which one is.

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
print(f"one sample: {first:.1f} ms sequentially, {second:.1f} ms speculatively ({first / second:.2f}×)")

# %% [markdown]
# ## Is it exact?
#
# `fs.check` tests whether the network processes each row independently, whether the drafter looks ahead, and whether
# both samplers have the same distribution, at a stated false-alarm level. A closed-form chain makes that quick.

# %%
checked = fs.check(fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0), window=8, samples=check_samples)
print(checked)
assert checked.passed
