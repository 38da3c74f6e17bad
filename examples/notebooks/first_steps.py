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
# A diffusion sampler asks its network once for every step. `foresample` drafts a window of steps, checks them with one
# call, and keeps or corrects them such that the samples have **exactly** the sequential sampler's distribution.
#
# Needs `pip install 'foresample[models,cli]'`. Nothing is downloaded: a small Fashion-MNIST model is in the package.

# %%
import matplotlib.pyplot as plt

import foresample as fs

# %% tags=["parameters"]
count, steps, window = 12, 100, 8
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
# `fs.sequential` is the baseline, and the oracle of all tests. The two draw other samples, of one distribution.

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
# ## What it costs
#
# Fewer calls one after another, more states evaluated in all. Whether that is faster depends on the machine: a GPU that
# is not yet full evaluates nine states in the time of one, a CPU core does not. `fs.tune` measures, and says so if the
# sequential sampler is faster.

# %%
print(f"calls {run.report.calls_mean:.1f} instead of {steps}, states {run.report.evaluations_mean:.1f}")
print(f"seconds {run.report.seconds:.2f} instead of {plain.report.seconds:.2f}")

# %% [markdown]
# ## Is it exact?
#
# `fs.check` asks whether the network treats each row by itself, whether the drafter looks ahead, and whether both
# samplers have one law, at a stated false-alarm level. A closed-form chain makes that quick.

# %%
checked = fs.check(fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0), window=8, samples=check_samples)
print(checked)
assert checked.passed
