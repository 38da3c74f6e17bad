"""`accelerate` and `restore`: one line for everything known here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from foresample.contracts import Drafter, at_least_one
from foresample.drafters import Prior
from foresample.integrations.packages import (
    AcceleratedPackage,
    accelerate_package,
    is_package,
    restore_package,
)
from foresample.integrations.pipelines import (
    AcceleratedPipeline,
    accelerate_pipeline,
    is_pipeline,
    restore_pipeline,
)
from foresample.integrations.policies import AcceleratedPolicy, accelerate_policy, is_policy, restore_policy


def accelerate(
    served: Any,
    window: int | Literal["auto"] = 16,
    *,
    drafter: Drafter | None = None,
    block: int | None = None,
    recycle: bool = True,
    batch_pad: bool | int = False,
    graph: bool = False,
    prior: Prior | str | Path | None = None,
    warm: bool = False,
    executed: int | None = None,
    pilots: int | None = None,
    trace: bool = True,
    look: bool = True,
) -> AcceleratedPipeline | AcceleratedPolicy | AcceleratedPackage:
    """From now on a pipeline, a policy or a package's sampler draws speculatively: the same law, fewer calls.

    It is used as before; its attribute `foresample_report` tells what the last call cost. `restore`, or leaving the
    `with` block this was used in, undoes everything:

        with foresample.accelerate(policy):
            action = policy.select_action(observation)

    A generator passed to it (torch's global one otherwise) seeds each image or plan; they are other draws than the
    sequential sampler makes of that generator, of one law.

    Args:
        served: a diffusers pipeline with a `unet` or a `transformer` and a stochastic scheduler; LeRobot's
            DiffusionPolicy (or its `.diffusion`) or multi-task DiT, or a policy of diffusion_policy, robomimic or
            ManiSkill; denoising-diffusion-pytorch's GaussianDiffusion; MONAI's DiffusionInferer; boltz's
            AtomDiffusion.
        window: transitions drafted in a round; a call evaluates at most window + 1 states of each image or plan.
            "auto": the first calls are drawn with several, and the fastest is kept.
        drafter: as for `sample`.
        block: as for `sample`.
        recycle: as for `sample`.
        batch_pad: for policies, call the network with one number of states always, for torch.compile and CUDA
            graphs: True means plans × (window + 1), a number means that many. The padding's results are dropped.
        graph: for policies on a GPU, replay rounds as CUDA graphs; a new observation needs no new capture.
        prior: for policies, a `Prior` fitted on other plans or the path of a saved one.
        warm: for policies, draft a plan's first window from the last plan (of the same row of the batch), moved on by
            the actions executed since; the plan then also depends on the last one, its law does not. `reset()` of the
            policy forgets.
        executed: actions executed between two plans; the policy's `n_action_steps` by default.
        pilots: for policies, fit a prior on so many first plans, from what they evaluate anyway.
        trace: watch three steps of the untouched loop first (of a pipeline, once per configuration: `foresample_trace`
            tells what that took), and refuse what the chain does not explain.
        look: as for `sample`, at the first use of a configuration. For a pipeline, every call evaluates one state of
            the call before again, whose answer must not change; the report's `evidence` tells the outcome.
    """
    if window != "auto":
        window = at_least_one("window", window)
    block = None if block is None else at_least_one("block", block)
    if is_policy(served):
        return accelerate_policy(
            served,
            window,
            drafter,
            block,
            recycle,
            batch_pad,
            graph,
            prior,
            warm,
            executed,
            pilots,
            trace,
            look,
        )
    if is_pipeline(served) or is_package(served):
        for name, given in (("batch_pad", batch_pad), ("graph", graph), ("prior", prior), ("warm", warm)):
            if given not in (False, None):
                raise ValueError(f"{name} is a matter of policies: leave it out for a pipeline")
    if is_package(served):
        if window == "auto":
            raise ValueError("a package's sampler is given its window as a number, 16 say")
        return accelerate_package(served, window, drafter, block, recycle, look)
    if is_pipeline(served):
        return accelerate_pipeline(served, window, drafter, block, recycle, trace, look)
    raise _unknown(served)


def restore(served: Any) -> None:
    """Undo `accelerate`; does nothing to what was not accelerated."""
    if is_policy(served):
        restore_policy(served)
    elif is_package(served):
        restore_package(served)
    elif is_pipeline(served):
        restore_pipeline(served)
    else:
        raise _unknown(served)


def _unknown(served: Any) -> TypeError:
    return TypeError(
        f"{type(served).__name__} is nothing foresample knows how to accelerate: pass a diffusers pipeline (a "
        "scheduler, and a unet or a transformer), LeRobot's DiffusionPolicy or a policy of the diffusion_policy "
        "family (conditional_sample, noise_scheduler, num_inference_steps and a network called unet or model), one of "
        "robomimic or ManiSkill, denoising-diffusion-pytorch's GaussianDiffusion, MONAI's DiffusionInferer or boltz's "
        "AtomDiffusion, or make a target with foresample.targets"
    )
