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
# # Your own network
#
# After this notebook you can wrap a denoiser of your own, sample it speculatively, check it and time it. Any function
# of states, times and rows will do; here a small network is trained on a spiral and wrapped as a DDPM target. Needs
# `pip install foresample matplotlib`.

# %%
from statistics import median
from time import perf_counter

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import foresample as fs

torch.manual_seed(0)

# %% tags=["parameters"]
training_steps, steps, count, window, turns = 3000, 100, 1000, 16, 21
check_samples = 1000

# %% [markdown]
# ## Data and training
#
# Nothing special: noise prediction, mean squared error.


# %%
def spiral(n: int) -> Tensor:
    angle = 3.5 * torch.pi * torch.rand(n).sqrt()
    return torch.stack([angle.cos(), angle.sin()], 1) * angle.unsqueeze(1) / 6 + 0.02 * torch.randn(n, 2)


class Denoiser(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angle = time.unsqueeze(1) / 1000 * torch.pi * 2.0 ** torch.arange(8)
        return self.layers(torch.cat([x, angle.sin(), angle.cos()], 1))


alpha_bar = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
network = Denoiser()
optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
for _ in range(training_steps):
    x0, t, noise = spiral(256), torch.randint(1000, (256,)), torch.randn(256, 2)
    level = alpha_bar[t].unsqueeze(1)
    loss = ((network(level.sqrt() * x0 + (1 - level).sqrt() * noise, t.float()) - noise) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
network.requires_grad_(False)
print(f"loss {loss.item():.3f}")

# %% [markdown]
# ## The target
#
# `targets.vp` takes the noise levels the chain visits, from noise to data, the time that the network gets at each,
# and the kind of its answer. Rows of one call are at different steps, so `time` is a tensor. `row` is the index of
# the sample that a row belongs to: look up labels or prompts with it.

# %%
timesteps = torch.linspace(999, 0, steps).long()
target = fs.targets.vp(
    lambda x, time, row: network(x, time.float()), alpha_bar[timesteps], (2,), time=timesteps, predicts="eps"
)

# %% [markdown]
# ## Check, then sample

# %%
checked = fs.check(target, window=window, samples=check_samples)
print(checked)
assert checked.passed

# %%
plain = fs.sequential(target, count, seed=0)
run = fs.sample(target, count, window=window, seed=1)
print(f"{run.report.calls_mean:.1f} calls a sample instead of {steps}: {run.speedup:.2f}× fewer")

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True)
for ax, (title, points) in zip(
    axes, (("data", spiral(count)), ("sequential", plain.samples), ("speculative", run.samples)), strict=True
):
    ax.scatter(*points.T, s=2)
    ax.set(title=title, aspect="equal")
plt.show()

# %% [markdown]
# ## How long one sample takes
#
# Both samplers draw one sample in turns.

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
# ## A network that is refused
#
# A network that mixes rows has no transition distribution. It is refused at the first call.


# %%
def mixing(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    return network(x - x.mean(0), time.float())


try:
    fs.sample(fs.targets.vp(mixing, alpha_bar[timesteps], (2,), time=timesteps), 8, window=window)
except ValueError as error:
    print(error)
else:
    raise AssertionError("it should be refused")
