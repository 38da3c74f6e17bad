"""A stranger's program: every public name, used as documented, under `mypy --strict`; and it runs.

It stands here to be copied away: nothing but the installed package, torch and the standard library is imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import foresample as fs
from foresample import chains, samplers, targets


class Walk:
    """A target of one's own."""

    def __init__(self, steps: int) -> None:
        self.std = torch.full((steps,), 0.3, dtype=torch.float64)
        self.shape = torch.Size([2])

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return noise

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return -x

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor) -> Tensor:
        return x + 0.1 * prediction


class Lazy:
    """A drafter of one's own: it guesses that nothing changes."""

    def begin(self, rows: int, window: int, like: Tensor) -> fs.drafters.DrafterMemory:
        return {"last": like.new_zeros(rows, *like.shape), "known": like.new_zeros(rows, dtype=torch.bool)}

    def reach(self, memory: fs.drafters.DrafterMemory, window: int) -> Tensor:
        return memory["known"] * window

    def guess(
        self,
        memory: fs.drafters.DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: fs.drafters.PreviousDraft | None,
    ) -> Tensor:
        return memory["last"]

    def learn(
        self, memory: fs.drafters.DrafterMemory, path: fs.drafters.DraftPath, committed: Tensor
    ) -> fs.drafters.DrafterMemory:
        index = torch.arange(len(committed), device=committed.device)
        last = path.predictions[index, (committed - 1).clamp(min=0)]
        return {"last": last, "known": torch.ones_like(memory["known"])}


def denoiser(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    return 0.1 * x


def use_samplers() -> list[Tensor]:
    """k-diffusion's names."""

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        return x / (1 + sigma.view(-1, 1) ** 2)

    sigmas = torch.tensor([10.0, 5.0, 2.0, 1.0, 0.3, 0.0])
    x = 10 * torch.randn(2, 3)
    churned: list[Callable[..., Tensor]] = [samplers.sample_euler, samplers.sample_heun, samplers.sample_dpm_2]
    ancestral: list[Callable[..., Tensor]] = [
        samplers.sample_dpm_2_ancestral,
        samplers.sample_dpmpp_2m_sde,
        samplers.sample_dpmpp_2s_ancestral,
        samplers.sample_dpmpp_3m_sde,
        samplers.sample_dpmpp_sde,
        samplers.sample_euler_ancestral,
    ]
    drawn = [sampler(model, x, sigmas, s_churn=2.0, window=3, seed=0) for sampler in churned]
    return drawn + [sampler(model, x, sigmas, window=3, seed=0) for sampler in ancestral]


def use_chains() -> list[chains.Chain]:
    """Coefficients alone."""
    sigmas = chains.karras_sigmas(5, 0.1, 10.0)
    processes: list[chains.VP | chains.VE | chains.SubVP] = [chains.VP(), chains.VE(), chains.SubVP()]
    kind: chains.Kind = "x0"
    return [
        chains.vp_chain(torch.linspace(0.1, 0.9, 5), reuse=kind),
        chains.flow_chain(torch.linspace(1, 0.1, 5), churn=1.0),
        chains.edm_chain(sigmas, churn=2.0),
        chains.langevin_chain(0.01, 5),
        chains.euler_ancestral_chain(sigmas),
        chains.dpm_2_ancestral_chain(sigmas),
        chains.dpmpp_2m_sde_chain(sigmas),
        chains.dpmpp_2s_ancestral_chain(sigmas),
        chains.dpmpp_3m_sde_chain(sigmas),
        chains.dpmpp_sde_chain(sigmas),
        *(chains.reverse_sde_chain(process, 5) for process in processes),
        chains.sde_chain(
            [0.9, 0.5, 0.1], processes[0].drift, processes[0].diffusion, levels=processes[0].levels
        ),
    ]


def use_targets() -> list[fs.Target]:
    """A chain and a network."""
    network: targets.Denoiser = denoiser
    vp = targets.vp(network, torch.linspace(0.1, 0.9, 6), (2,), predicts="eps")
    chained: targets.ChainTarget = targets.from_chain(network, use_chains()[0], (2,))
    mixture: fs.GaussianMixture = fs.GaussianMixture.of_draft_trees(2)
    waves: targets.FrequencyTarget = targets.in_frequencies(
        targets.langevin(lambda x, step, row: -x, (1, 2, 2), step_size=0.01, steps=6)
    )

    def walk(prediction: torch.Tensor, x: torch.Tensor, k: int, noise: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * prediction + 0.3 * noise

    step: targets.Step = walk
    by_step: targets.StepTarget = targets.from_step(step, lambda x, k, row: -x, (2,), 6)
    assert float(targets.step_error(by_step, step).max()) < 1e-5
    inside: targets.ConstrainedTarget = targets.constrained(
        vp, lambda x, row: x.mean(1, keepdim=True).expand_as(x)
    )
    assert inside.constrained(torch.ones(3, 2)).shape == (3, 2)
    assert waves.pictures(fs.sample(waves, 2, window=3).samples).shape == (2, 1, 2, 2)
    return [
        vp,
        chained,
        targets.flow(network, torch.linspace(1, 0.1, 6), (2,), churn=1.0),
        targets.from_edm(network, chains.karras_sigmas(6, 0.1, 10.0), (2,), churn=2.0),
        targets.reverse_sde(network, chains.VP(), 6, (2,)),
        targets.from_sde(
            network, [0.9, 0.5, 0.2, 0.1], lambda t: -t, lambda t: (2 * t).sqrt(), (2,), start_std=2.0
        ),
        targets.langevin(network, (2,), step_size=0.01, steps=6),
        by_step,
        targets.guided(vp, lambda x, step, row: -(x**2).sum(1)),
        targets.vp(targets.with_gradients(network), torch.linspace(0.1, 0.9, 6), (2,)),
        inside,
        targets.centred(targets.langevin(network, (3, 2), step_size=0.01, steps=6)),
        targets.fixed(vp, torch.ones(2), torch.tensor([1, 0])),
        mixture.flow(6, 1.0),
        Walk(6),
    ]


def use_everything(folder: Path) -> None:
    """Draw one sample, several, a stream and a dataset."""
    target: fs.Target = Walk(12)
    drafters: list[fs.Drafter] = [
        Lazy(),
        fs.Replay(),
        fs.Frozen("head"),
        fs.DraftModel(Walk(12)),
        fs.Replay(prior=fs.fit_prior(target, window=4, pilots=8)),
    ]
    prior: fs.Prior = fs.fit_prior(target, window=4, pilots=8)
    assert prior is not None
    commits: list[fs.Commit] = []
    for drafter in drafters:
        run: fs.Run = fs.sample(target, 4, window=4, drafter=drafter, observe=commits.append)
        report: fs.Report = run.report
        assert run.samples.shape == (4, 2)
        assert report.calls_mean <= 12
    assert sum(int(commit.committed.sum()) for commit in commits) == len(drafters) * 4 * 12
    assert fs.sequential(target, 4).speedup == 1
    assert fs.check(target, window=4, samples=100).passed
    engine: fs.Engine = fs.Engine(target, window=4, slots=2)
    streamed: list[fs.Sample] = list(engine.stream([1, 2, 3]))
    assert [one.seed for one in streamed] == [
        one.seed for one in fs.stream(target, seeds=[1, 2, 3], window=4, slots=2)
    ]
    tuning: fs.Tuning = fs.tune(target, windows=[2], samples=2)
    assert "sample" in tuning.advice
    frontier: fs.Frontier = fs.tune(target, slots=[1], windows=[2])
    assert frontier.best().samples_per_second > 0
    for one in use_targets():
        assert fs.sample(one, 2, window=3).samples.isfinite().all()
    spread: fs.Target = targets.replicated(use_targets()[:1])
    assert fs.sample(spread, 2, window=3).samples.isfinite().all()
    try:
        dataset: fs.Dataset = fs.generate(target, 10, out=folder, window=4, shard=5)
        assert fs.inspect_dataset(folder).complete == dataset.complete
    except ImportError as error:  # safetensors is an extra
        print(error)
    assert all(drawn.isfinite().all() for drawn in use_samplers())
    for refused in (fs.accelerate, fs.restore):
        try:
            refused(object())
        except TypeError as error:
            print(error)
    print(fs.__version__, fs.pretrained.EMBEDDED.name, targets.structures, chains.scheduler_chain)
    print(targets.StructureTarget, targets.from_scheduler, chains.Kind, chains.Chain)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        use_everything(Path(scratch) / "dataset")
