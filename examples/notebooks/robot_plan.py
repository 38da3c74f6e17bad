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
# # A robot's plan
#
# After this notebook you can accelerate a robot's policy and measure the time of its plans.
#
# A diffusion policy plans anew every few actions, and the robot waits for each plan, so the latency of one plan
# counts. This is a small policy with the interface of LeRobot's `DiffusionPolicy`, trained on human handwriting: from
# where its pen is, it plans 16 velocities with 100 denoising steps and executes 8. LeRobot's own class takes the same
# line:
#
#     policy = DiffusionPolicy.from_pretrained("lerobot/diffusion_pusht")
#     foresample.accelerate(policy, window=16)
#
# Needs `pip install 'foresample[models,cli]'`.

# %%
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import torch

import foresample as fs
from foresample.pretrained import policy as handwriting

policy = handwriting.load()
print(f"shapes {', '.join(handwriting.SHAPES)}; {policy.config.num_train_timesteps} denoising steps a plan")

# %% tags=["parameters"]
plans, window = 14, 16

# %% [markdown]
# ## Closed loop
#
# Plan, execute, read the position of the pen, plan again.


# %%
def draw(shape: int, seed: int) -> tuple[torch.Tensor, list[int], list[float]]:
    """The pen's path, and the network calls and milliseconds of each plan."""
    generator = torch.Generator().manual_seed(seed)
    position, velocity = torch.tensor([handwriting.STARTS[shape]]), torch.zeros(1, 2)
    path, calls, clock = [position], [], []
    for _ in range(plans):
        began = perf_counter()
        actions = policy.predict_action_chunk(position, velocity, torch.tensor([shape]), generator)
        clock.append(1000 * (perf_counter() - began))
        report = getattr(policy, "foresample_report", None)
        calls.append(report.rounds if report else policy.config.num_train_timesteps)
        path.append(position + actions[0].cumsum(0))
        position, velocity = path[-1][-1:], actions[:, -1]
    return torch.cat(path), calls, clock


# %%
sequential = [draw(shape, seed=0) for shape in range(2)]

# %% [markdown]
# ## One line
#
# Inside the `with` block the policy plans speculatively; outside it is as it was. The first plan also watches three
# steps of the policy's own loop, and refuses one that the chain does not explain.

# %%
with fs.accelerate(policy, window=window):
    speculative = [draw(shape, seed=0) for shape in range(2)]
assert not hasattr(policy, "foresample_report")

# %%
for name, drawn in (("sequential", sequential), ("speculative", speculative)):
    calls, clock = (torch.tensor([one[i] for one in drawn]).double().flatten() for i in (1, 2))
    print(f"{name:12} {calls.mean():6.1f} calls a plan, median {clock.median():6.1f} ms")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4))
for ax, name, plain, ours in zip(axes, handwriting.SHAPES, sequential, speculative, strict=False):
    ax.plot(*plain[0].T, label="sequential", color="gray")
    ax.plot(*ours[0].T, label="speculative", color="crimson")
    ax.set(title=name, aspect="equal")
axes[0].legend()
plt.show()

# %% [markdown]
# ## Warm
#
# With `warm=True` a plan's first window is drafted from the last plan, moved on by the actions executed since. A plan
# then also depends on the last one; its distribution does not.

# %%
with fs.accelerate(policy, window=window, warm=True):
    warm = draw(0, seed=0)
print(f"warm         {sum(warm[1][1:]) / (plans - 1):6.1f} calls a plan")

# %% [markdown]
# ## LeRobot's own class
#
# This cell needs LeRobot and a checkout of this repository, whose assets hold a small `DiffusionPolicy` trained on
# tasks of Meta-World. `reset` empties the queue of actions, so that every action needs a new plan. The observation is
# all zeros, the average of the training data in the units of the policy.

# %%
try:
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
except ImportError as error:
    DiffusionPolicy = None
    print(f"left out: LeRobot cannot be imported ({error}); docs/robots.md shows how to install it")

places = [place / "assets" / "metaworld_policy" for place in (Path.cwd(), *Path.cwd().parents)]
folder = next((place for place in places if place.exists()), None)
lerobot_calls = None
if DiffusionPolicy is not None and folder is not None:
    robot = DiffusionPolicy.from_pretrained(folder)
    observation = {
        name: torch.zeros(1, *feature.shape) for name, feature in robot.config.input_features.items()
    }

    def act() -> float:
        """Milliseconds until the first action of a new plan."""
        robot.reset()
        began = perf_counter()
        robot.select_action(observation)
        return 1000 * (perf_counter() - began)

    act()  # warms up
    print(f"sequential   {robot.diffusion.num_inference_steps:6.1f} calls a plan, {act():6.1f} ms")
    with fs.accelerate(robot, window=window):
        act()  # watches the policy's own loop
        clocked, lerobot_calls = act(), robot.foresample_report.rounds
    print(f"speculative  {lerobot_calls:6.1f} calls a plan, {clocked:6.1f} ms")
