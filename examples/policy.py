"""A robot policy, accelerated: the handwriting policy draws a shape in closed loop.

    python -m examples.policy

The policy has the interface of LeRobot's; with LeRobot installed the same three lines accelerate its own:

    policy = DiffusionPolicy.from_pretrained("lerobot/diffusion_pusht")
    foresample.accelerate(policy, window=16)
    action = policy.select_action(observation)
"""

from __future__ import annotations

import torch
from torch import Tensor

import foresample
from foresample.pretrained import policy as handwriting


def draw(policy: handwriting.LasaPolicy, start: Tensor, plans: int, seed: int = 0) -> tuple[Tensor, list[int]]:
    """The pen's path, [points, 2], from a start [1, 2], and the network calls of each plan."""
    generator = torch.Generator().manual_seed(seed)
    position, velocity, shape = start, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    path, calls = [start], []
    for _ in range(plans):
        actions = policy.predict_action_chunk(position, velocity, shape, generator)
        path += list((position + actions[0].cumsum(0)).split(1))
        position, velocity = path[-1], actions[:, -1]
        report = getattr(policy, "foresample_report", None)
        calls.append(report.rounds if report else policy.diffusion.num_inference_steps)
    return torch.cat(path), calls


def main(plans: int = 14) -> list[int]:
    policy = handwriting.load()
    start = torch.tensor([[0.72, 0.66]])  # where the demonstrations of the first shape begin
    path, calls = draw(policy, start, plans)
    print(f"sequential   {sum(calls)} network calls for {plans} plans, the pen ends at {path[-1].tolist()}")
    with foresample.accelerate(policy, window=16):
        path, calls = draw(policy, start, plans)
    print(f"accelerated  {sum(calls)} network calls for {plans} plans, the pen ends at {path[-1].tolist()}")
    return calls


if __name__ == "__main__":
    main()
