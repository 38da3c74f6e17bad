"""Equal terms: every exact method at the same number of states a call, as curves over that number.

python -m benchmarks.curves mixture
python -m benchmarks.curves mixture --steps 300
python -m benchmarks.curves langevin
python -m benchmarks.curves wells
python -m benchmarks.curves policy
python -m benchmarks.curves fashion --device cuda
python -m benchmarks.curves cifar10 --device cuda
python -m benchmarks.curves redraw

The terms are the *verification batch*: the states of one sample that one call may evaluate. A chain that gets
its prediction free of charge drafts one state fewer than the batch, for the first state is evaluated too; one
that pays a call for it (reflection with a head, ASD) drafts the whole batch; a tree with its root fits in it.
A window wider than the chain is cut.

Everybody is tuned by the same rule: on pilot seeds, which are not those measured, each method takes the
prediction that is better for it to reuse, and each tree the best of several shapes (`shapes`). Results are
saved row by row, and a run with the same settings at the same commit goes on where the last one was cut. `redraw`
measures nothing: it draws the pictures of all saved curves again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.quality import QualityCost
from benchmarks.kinds.rivals import CurvePoint, Curves, CurveSettings
from benchmarks.names import label
from benchmarks.peers import asd, blocks, dgrs, nodes, rass, reflection
from benchmarks.results import RESULTS, load, read, save
from foresample import pretrained
from foresample.chains import Kind
from foresample.contracts import Target
from foresample.provenance import provenance
from foresample.targets import from_scheduler, langevin

BATCHES = (5, 9, 16, 33, 64, 128, 200)
PILOT_SEED = 900_000

Shape = tuple[int, ...]
Draw = Callable[[Target, int, int, int, Shape | None], Any]
"""draw(target, count, seed, states a call, shape of the tree) -> calls and evaluations of each sample."""


# ------------------------------------------------------------------ methods


def drafts(target: Target, states: int) -> int:
    """The window for that many states a call: one of them is its first, and the chain ends somewhere."""
    return max(1, min(states, len(target.std)) - 1)


def ours(**arguments: Any) -> Draw:
    """`foresample.sample`."""
    return lambda target, count, seed, states, shape: fs.sample(
        target, count, seed=seed, window=drafts(target, states), **arguments
    )


def chain(peer: Callable[..., Any], draft: str) -> Draw:
    """A peer that drafts one path; with a head its verifying call need not evaluate the first state."""
    more = 1 if draft == "head" else 0
    return lambda target, count, seed, states, shape: peer(
        target, count, seed=seed, window=drafts(target, states) + more, draft=draft
    )


def tree(peer: Callable[..., Any]) -> Draw:
    """A peer that drafts a tree."""
    return lambda target, count, seed, states, shape: peer(target, count, seed=seed, children=shape)


METHODS: dict[str, Draw] = {
    "default": ours(),
    "replay-block": ours(drafter=fs.Replay(secant=False)),
    "reflection-head": chain(reflection, "head"),
    "reflection-parent": chain(reflection, "parent"),
    "reflection-nearest": chain(reflection, "nearest"),
    "blocks-parent": chain(blocks, "parent"),
    "blocks-nearest": chain(blocks, "nearest"),
    "asd": lambda target, count, seed, states, shape: asd(
        target, count, seed=seed, lookahead=drafts(target, states) + 1
    ),
    "dgrs": tree(dgrs),
    "rass": tree(rass),
}
OURS = ("default", "replay-block")
TREES = ("dgrs", "rass")
SHARE = 4
"""Trees, which take long here, draw a quarter of the samples, but ten if there are as many."""

WIDE: tuple[Shape, ...] = (
    *((), (2,), (3,), (5,), (8,), (2, 2), (3, 2), (5, 3)),
    *((2, 2, 2), (4, 3, 2), (7, 4, 2), (5, 5, 5), (3, 3, 3, 3)),
)
"""Numbers of children by level, from the root on; deeper levels have single children."""


def shapes(states: int, steps: int) -> list[Shape]:
    """Candidate trees whose root and nodes are at most that many: each branching, then as deep as it can be.

    A tree of a single level is a candidate where there is no other with that branching.
    """
    found: dict[Shape, None] = {}
    for wide in WIDE:
        spare, leaves = states - 1 - nodes(wide), math.prod(wide)
        deep = min(spare // leaves, steps - 1 - len(wide))
        if spare >= 0 and deep >= 0 and len(wide) + deep > 0:
            found[wide + (1,) * deep] = None
    return list(found)


# ------------------------------------------------------------------ targets


@dataclass(frozen=True)
class Problem:
    """A chain to sample, in one or several parametrisations."""

    name: str
    """A label for people."""
    targets: dict[str, Target]
    """The targets by the prediction that drafters reuse; ASD is made for x0."""


def mixture(steps: int, device: str, half: bool) -> Problem:
    """The Gaussian mixture of the draft-tree papers, d = 500, churn 0.1."""
    law = fs.GaussianMixture.of_draft_trees(500)
    kinds: tuple[Kind, ...] = ("v", "x0")
    targets: dict[str, Target] = {kind: law.flow(steps, 0.1, reuse=kind) for kind in kinds}
    return Problem("Gaussian mixture of the draft-tree papers, d = 500, ε = 0.1", targets)


def posterior(steps: int, device: str, half: bool) -> Problem:
    """Langevin dynamics of a Bayesian logistic regression: 64 weights, 256 observations, from its prior.

    U(w) = ½ ‖w‖² + Σ_i ln(1 + exp(−y_i a_i · w)), features a_i ~ N(0, I/4), labels drawn by weights from the
    prior; step size 0.005, a twentieth of what the stiffest direction could bear. Its Hessian is no multiple
    of the identity and changes with w.
    """
    generator = torch.Generator().manual_seed(0)
    x64: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    features, weights = torch.randn(256, 64, **x64) / 2, torch.randn(64, **x64)
    label = torch.where(torch.rand(256, **x64) < torch.sigmoid(features @ weights), 1.0, -1.0)
    signed = (features * label.unsqueeze(1)).to(device)

    def force(w: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return torch.sigmoid(-w @ signed.T) @ signed - w

    target = langevin(force, (64,), step_size=0.005, steps=steps, dtype=torch.float64, device=device)
    return Problem("Langevin, posterior of a logistic regression, d = 64", {"force": target})


def wells(steps: int, device: str, half: bool) -> Problem:
    """Langevin dynamics of 64 double wells in a ring, U = Σ (x_i² − 1)² + ½ (x_i − x_{i+1})², from N(0, I).

    Hard for drafts that reuse: the force grows as the cube of the state, and misleads where drafts strayed.
    """

    def force(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        return -4 * x * (x * x - 1) + x.roll(1, 1) + x.roll(-1, 1) - 2 * x

    target = langevin(force, (64,), step_size=0.005, steps=steps, dtype=torch.float64, device=device)
    return Problem("Langevin, ring of double wells, d = 64", {"force": target})


def policy(steps: int, device: str, half: bool) -> Problem:
    """Plans of the handwriting policy, at moments spread over the demonstrations."""
    from recipes import lasa

    planner = lasa.load().to(device)
    data = lasa.moments(lasa.demonstrations(), planner.config.horizon)
    every = slice(None, None, 97)
    condition = planner.condition(data.position[every], data.velocity[every], data.shape[every]).to(device)
    scheduler = planner.diffusion.noise_scheduler
    scheduler.set_timesteps(steps)
    shape = torch.Size([planner.config.horizon, planner.config.action_dim])

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return planner.diffusion.unet(x, time, global_cond=condition[row % len(condition)])

    target = from_scheduler(scheduler, network, shape, device=device)
    return Problem("Robot policy (handwriting)", {"x0": target})


def pictures(folder: Path, name: str, steps: int, device: str, half: bool) -> Problem:
    """Ancestral sampling of a trained DDPM, classes in turn."""
    model = pretrained.load(folder, device, torch.bfloat16 if half else torch.float32)
    kinds: tuple[Kind, ...] = ("x0", "v")
    return Problem(name, {kind: model.target(steps, reuse=kind) for kind in kinds})


CIFAR10 = Path(__file__).parent.parent / "assets" / "cifar10"
PROBLEMS: dict[str, tuple[Callable[[int, str, bool], Problem], int]] = {
    "mixture": (mixture, 30),
    "langevin": (posterior, 200),
    "wells": (wells, 100),
    "policy": (policy, 100),
    "fashion": (partial(pictures, pretrained.EMBEDDED, "Fashion-MNIST"), 100),
    "cifar10": (partial(pictures, CIFAR10, "CIFAR-10"), 100),
}
"""Makers of the problems, each with its usual number of steps."""


# ------------------------------------------------------------------ measuring


def measure(
    method: str,
    states: int,
    target: Target,
    reuse: str,
    shape: Shape | None,
    count: int,
    seed: int,
    part: int,
) -> CurvePoint:
    """Draw `count` samples, `part` at a time, and count their calls and evaluations."""

    def drawn(size: int, seed: int) -> tuple[Tensor, Tensor]:
        run = (
            fs.sequential(target, size, seed=seed)
            if method == "sequential"
            else METHODS[method](target, size, seed, states, shape)
        )
        return run.calls.double().cpu(), run.evaluations.double().cpu()

    parts = [drawn(min(part, count - first), seed + first) for first in range(0, count, part)]
    calls, evaluations = zip(*parts, strict=True)
    mean, error = with_error(torch.cat(calls))
    states_mean, states_error = with_error(torch.cat(evaluations))
    speedup = len(target.std) / mean
    return CurvePoint(
        method=method,
        exact=True,
        states=states,
        samples=count,
        calls=mean,
        calls_error=error,
        evaluations=states_mean,
        evaluations_error=states_error,
        speedup=speedup,
        speedup_error=speedup * error / mean,
        reuse=reuse,
        shape=None if shape is None else "-".join(map(str, shape)),
    )


def with_error(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error; 0 of a single value."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0
    return float(values.mean()), error


def tuned(
    method: str, states: int, targets: dict[str, Target], pilots: int, part: int
) -> tuple[str, Shape | None]:
    """The prediction that the method reuses and the shape of its tree, with the fewest calls on pilot seeds.

    First what is reused, with a tree of a single path; then the shape: all of them tried in turn (D-GRS) on a
    quarter of the pilots, the best three by the method itself on all. Pilots also warm a GPU up; on a CPU they
    are left out where there is nothing to choose.
    """

    def cost(reuse: str, shape: Shape | None, count: int = pilots, method: str = method) -> float:
        return measure(method, states, targets[reuse], reuse, shape, count, PILOT_SEED, part).calls

    kinds = ["x0"] if method == "asd" and "x0" in targets else list(targets)
    cold = targets[kinds[0]].std.device.type != "cpu"
    if method not in TREES and len(kinds) == 1 and not cold:
        return kinds[0], None
    if method not in TREES:
        return min(kinds, key=lambda kind: cost(kind, None)), None
    candidates = shapes(states, len(targets[kinds[0]].std))
    reuse = min(kinds, key=lambda kind: cost(kind, candidates[0])) if len(kinds) > 1 else kinds[0]
    if len(candidates) == 1:
        return reuse, candidates[0]
    quick = {shape: cost(reuse, shape, max(1, pilots // 4), "dgrs") for shape in candidates}
    return reuse, min(sorted(candidates, key=quick.__getitem__)[:3], key=lambda shape: cost(reuse, shape))


Cut = TypeVar("Cut", Curves, QualityCost)


def begun(kind: type[Cut], path: Path, settings: object) -> Cut | None:
    """A run that was cut, to go on with: same settings, commit and machine."""
    if not path.exists():
        return None
    saved, here = load(kind, path.stem, path.parent), provenance()
    if (saved.settings, saved.commit, asdict(saved.machine)) != (settings, here["commit"], here["machine"]):
        print(f"{path.name} is of other settings, another commit or machine: starting over")
        return None
    return saved


def curves(
    path: Path,
    problem: Problem,
    settings: CurveSettings,
    methods: Sequence[str],
    batches: Sequence[int],
) -> list[CurvePoint]:
    """Measure what is not in the file yet, batch by batch, and save each row as soon as it is there."""
    cut = begun(Curves, path, settings)
    rows, commands = (cut.rows, cut.commands) if cut else ([], [])
    commands = list(dict.fromkeys([*commands, provenance()["command"]]))
    count, part, steps = settings.samples, settings.part, settings.steps
    todo = [("sequential", 1), *((method, states) for states in batches for method in methods)]
    for method, states in todo:
        if any(row.method == method and row.states == states for row in rows):
            continue
        same = [row for row in rows if row.method == method and min(row.states, states) >= steps]
        if same and method not in TREES:  # the window covers the chain already
            row = replace(same[0], states=states)
        else:
            began = perf_counter()
            reuse, shape = next(iter(problem.targets)), None
            if method != "sequential":
                reuse, shape = tuned(method, states, problem.targets, settings.pilots, part)
            size = max(min(count, 10), count // SHARE) if method in TREES else count
            target, size = problem.targets[reuse], part if method == "sequential" else size
            row = measure(method, states, target, reuse, shape, size, settings.seed, part)
            print(line(row), f" [{perf_counter() - began:.0f} s]", flush=True)
        rows.append(row)
        save(path, "curves", settings, commands=commands, rows=rows)
    return rows


def line(row: CurvePoint) -> str:
    """A row printed while the comparison runs."""
    shown = f"{row.states:4d} {row.method:22s} {row.speedup:6.2f} ± {row.speedup_error:.2f}  {row.calls:7.2f} calls "
    shown += f"{row.evaluations:8.1f} evaluations  {row.reuse}"
    return shown + (f" {row.shape[:24]}" if row.shape else "")


def picture(path: Path, settings: CurveSettings, rows: Sequence[CurvePoint]) -> None:
    """Calls and evaluations of a sample against the states a call, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    others = [f"C{i}" for i in range(10) if i != 3]  # the fourth is red, too
    colours = dict(zip(METHODS, ["crimson", *others], strict=True))
    for axes, quantity in zip(panels, ("calls", "evaluations"), strict=True):
        for name, colour in colours.items():
            mine = [row for row in rows if row.method == name]
            if not mine:
                continue
            mine.sort(key=lambda row: row.states)
            axes.errorbar(
                [row.states for row in mine],
                [getattr(row, quantity) for row in mine],
                [getattr(row, f"{quantity}_error") for row in mine],
                label=label(name),
                color=colour,
                linewidth=2.6 if name == "default" else 1.3,
                linestyle="-" if name in OURS else "--" if name in TREES else ":",
                marker="o",
                markersize=4,
                capsize=2,
            )
        for row in rows:
            if row.method == "sequential":
                axes.axhline(getattr(row, quantity), color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="states a call", ylabel=f"{quantity} a sample")
        ticks = sorted({row.states for row in rows if row.method != "sequential"})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    where = "" if settings.device == "cpu" else ", on a GPU"
    figure.suptitle(f"{settings.target}, {settings.steps} steps{where} (grey: sequential)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def redraw(folder: Path) -> None:
    """Draw the pictures of all saved curves again."""
    for saved in read(folder).of(Curves):
        picture(saved.path.with_suffix(".png"), saved.settings, saved.rows)
        print(f"wrote {saved.path.with_suffix('.png')}")


def split(text: str | None, known: Sequence[Any], kind: Callable[[str], Any] = str) -> list[Any]:
    """A comma-separated choice; all of what is known by default."""
    return list(known) if text is None else [kind(part.strip()) for part in text.split(",")]


def choose(text: str | None, known: Sequence[str]) -> list[str]:
    """Methods by their keys; all by default."""
    chosen = split(text, known)
    if unknown := [method for method in chosen if method not in known]:
        raise typer.BadParameter(f"no method {unknown[0]!r}; there are: {', '.join(known)}")
    return chosen


def main(
    target: Annotated[str, typer.Argument(help=f"{', '.join(PROBLEMS)}; or redraw.")],
    steps: Annotated[int | None, typer.Option(help="Of the chain; each target has its usual number.")] = None,
    samples: Annotated[int, typer.Option(help="Measured for each method and batch.")] = 100,
    pilots: Annotated[int, typer.Option(help="Samples that tune a method, of other seeds.")] = 16,
    part: Annotated[int, typer.Option(help="Samples drawn together.")] = 25,
    seed: int = 0,
    methods: Annotated[str | None, typer.Option(help="Separated by commas; all by default.")] = None,
    batches: Annotated[str | None, typer.Option(help="States a call, separated by commas.")] = None,
    half: Annotated[bool, typer.Option(help="Run a trained network in bfloat16.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file and the picture.")] = RESULTS,
) -> None:
    """Measure one target and save `curves-<target>-T<steps>.json` (`…-cuda.json` on a GPU)."""
    if target == "redraw":
        return redraw(out)
    if target not in PROBLEMS:
        raise typer.BadParameter(f"target is one of {', '.join(PROBLEMS)}, not {target!r}")
    chosen = choose(methods, list(METHODS))
    make, usual = PROBLEMS[target]
    steps = steps or usual
    problem = make(steps, device, half)
    settings = CurveSettings(
        problem=target,
        target=problem.name,
        steps=steps,
        reuse=list(problem.targets),
        samples=samples,
        seed=seed,
        pilots=pilots,
        part=part,
        device=device,
        half=half,
    )
    path = out / f"curves-{target}-T{steps}{'' if device == 'cpu' else f'-{device}'}.json"
    rows = curves(path, problem, settings, chosen, split(batches, BATCHES, int))
    picture(path.with_suffix(".png"), settings, rows)


if __name__ == "__main__":
    typer.run(main)
