"""The command line: `foresample sample`, `generate`, `inspect`, `tune`, `check`, `bench` and `report`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from foresample import bench as benches
from foresample.contracts import Drafter, Target, require_target
from foresample.core.report import Report
from foresample.core.round import Commit
from foresample.datasets.generation import Dataset, Status, generate, inspect
from foresample.drafters import Frozen, Replay
from foresample.engine.tuning import WINDOWS, Tuning, tune
from foresample.pictures import contact_sheet
from foresample.selftest import LEVEL, check
from foresample.targets import GaussianMixture, Kind

app = typer.Typer(
    help="Exact speculative sampling for diffusion models.", no_args_is_help=True, add_completion=False
)
bench_app = typer.Typer(help="Methods × windows on one target.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

DRAFTERS: dict[str, Drafter] = {
    "replay": Replay(),
    "replay-plain": Replay(secant=False),
    "head": Frozen("head"),
    "parent": Frozen("parent"),
    "nearest": Frozen("nearest"),
}
CHAINS = ("flow", "vp", "langevin", "embedded")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ModelFolder = Annotated[
    Path | None, typer.Option(help="A diffusers DDPM folder; the embedded model by default.")
]
Label = Annotated[str | None, typer.Option(help="Class by name or number; all in turn by default.")]
Reuse = Annotated[str, typer.Option(help="Prediction that is reused: x0, v or eps.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Window = Annotated[int, typer.Option(min=1, help="Transitions drafted in a round.")]
Length = Annotated[int, typer.Option(min=1, help="Transitions of the chain.")]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random number.")]
Steps = Annotated[int, typer.Option(min=2, help="Transitions of the chain.")]
Churn = Annotated[float, typer.Option(help="Noise of the flow, ε.")]
Dim = Annotated[int, typer.Option(min=1, help="Dimension of the mixture.")]


def _kind(reuse: str) -> Kind:
    if reuse not in get_args(Kind):
        raise fail(f"--reuse takes one of {', '.join(get_args(Kind))}, not {reuse!r}")
    return cast(Kind, reuse)


def fail(message: str) -> typer.Exit:
    """One clear sentence on stderr, and exit status 2."""
    Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    return typer.Exit(2)


@app.command("sample")
def sample_command(
    count: Annotated[int, typer.Option(min=1, help="Pictures to draw.")] = 64,
    steps: Length = 100,
    window: Window = 8,
    label: Label = None,
    seed: Seed = 0,
    model: ModelFolder = None,
    reuse: Reuse = "x0",
    compare: Annotated[bool, typer.Option(help="Also run the sequential sampler, and show both.")] = False,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for pictures, samples and report.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Draw pictures from a diffusion model, exactly, in a few calls."""
    from foresample import pretrained
    from foresample.draw import Settings, draw

    kind = _kind(reuse)
    settings = Settings(count, steps, window, seed, kind, label, compare)
    try:
        source = pretrained.load(model or pretrained.EMBEDDED, device)
        with _RunBars(count * steps, disable=as_json) as bars:
            drawing = draw(source, settings, out, bars.update)
    except (ImportError, OSError, ValueError, RuntimeError, FloatingPointError) as error:
        raise fail(str(error)) from None
    if drawing.report is None:
        where = f", saved in {out}" if drawing.files else ""
        print(f"interrupted: {len(drawing.samples)} of {count} samples were finished{where}", file=sys.stderr)
        raise typer.Exit(130)
    if as_json:
        print((out / "report.json").read_text())
        return
    Console().print(_sample_table(drawing.report, cast(float, drawing.sequential_seconds), measured=compare))
    print("wrote " + ", ".join(str(path) for path in drawing.files))


def _sample_table(report: Report, sequential_seconds: float, *, measured: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for column in ("per sample", "sequential", "speculative", ""):
        table.add_column(column, justify="left" if column == "per sample" else "right", no_wrap=True)
    evaluations = report.evaluations_mean / report.steps
    table.add_row(
        "network calls", f"{report.steps}", f"{report.calls_mean:.1f}", f"{report.speedup:.2f}× fewer"
    )
    table.add_row(
        "states evaluated", f"{report.steps}", f"{report.evaluations_mean:.1f}", f"{evaluations:.2f}× as many"
    )
    faster = sequential_seconds / report.seconds
    verdict = f"{faster:.2f}× faster" if faster >= 1 else f"{1 / faster:.2f}× slower"
    mark = "" if measured else "≈ "
    table.add_row(
        f"seconds, all {report.count}", f"{mark}{sequential_seconds:.1f}", f"{report.seconds:.1f}", verdict
    )
    if faster < 1:
        table.caption = (
            "Fewer calls pay on the clock where a call on more\n"
            "states costs little more: on a GPU not yet full.\n"
            "Here every further state costs its full price."
        )
    return table


@app.command("generate")
def generate_command(
    count: Annotated[int, typer.Option(min=1, help="Samples of the dataset.")],
    out: Annotated[Path, typer.Option(help="Its folder; run the same command again to go on.")],
    steps: Length = 250,
    window: Window = 8,
    slots: Annotated[int, typer.Option(min=1, help="Samples under way at a time, in each worker.")] = 64,
    shard: Annotated[int, typer.Option(min=1, help="Samples of a file.")] = 1000,
    label: Label = None,
    seed: Seed = 0,
    model: ModelFolder = None,
    reuse: Reuse = "x0",
    device: Device = "cpu",
    half: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compile the network.")] = False,
    graph: Annotated[bool, typer.Option(help="Replay rounds as a CUDA graph.")] = False,
    law: Annotated[int, typer.Option(min=0, help="Compare with so many sequential samples at the end.")] = 0,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: auto, or a cluster's address.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="On Ray, CPUs of a worker without a GPU.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a dataset into shards; resumes. Exit status 3 if samples broke, 1 if the law check failed."""
    from foresample import pretrained

    recipe = pretrained.Recipe(
        (model or pretrained.EMBEDDED).resolve(), steps, label, _kind(reuse), device, half, compiled
    )
    if ray is not None and device == "cpu":
        cpus = cpus or 1
    try:
        with _DatasetBar(count, disable=as_json) as bar:
            dataset = generate(
                recipe,
                count,
                out=out,
                window=window,
                slots=slots,
                shard=shard,
                seed=seed,
                labels=recipe.labels(),
                about=recipe.about(),
                law=law,
                ray=ray,
                cpus=cpus,
                progress=bar.update,
                graph=graph,
            )
    except KeyboardInterrupt:
        print(
            f"interrupted: run the same command again to go on; what is finished is in {out}", file=sys.stderr
        )
        raise typer.Exit(130) from None
    except (ImportError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise fail(str(error)) from None
    _show_dataset(dataset, as_json=as_json)
    if dataset.failures:
        raise typer.Exit(3)
    if dataset.law is not None and not dataset.law.passed:
        raise typer.Exit(1)


@app.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(help="Of foresample generate.")],
    pictures: Annotated[int, typer.Option(min=1, help="On the contact sheet, at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Verify a dataset, say what is in it, and paint a contact sheet. Exit status 1 if it is not complete."""
    try:
        dataset = inspect(folder)
        sheet = contact_sheet(dataset, pictures)
        if sheet is not None:
            sheet.save(folder / "contact.png")
    except (ImportError, OSError, ValueError) as error:
        raise fail(str(error)) from None
    _show_dataset(dataset, as_json=as_json)
    if sheet is not None and not as_json:
        print(f"wrote {folder / 'contact.png'}")
    if not dataset.complete:
        raise typer.Exit(1)


def _show_dataset(dataset: Dataset, *, as_json: bool) -> None:
    manifest, law, most = dataset.manifest, dataset.law, 10
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    settings, costs = manifest["settings"], manifest["costs"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    shape = "×".join(map(str, settings["shape"]))
    table.add_row("samples", f"{costs['samples']} of {settings['count']}, {shape}, {settings['dtype']}")
    table.add_row("shards", f"{len(manifest['shards'])} of {settings['shard']} samples, each with its checksum")
    table.add_row("chain", f"{settings['steps']} steps, window {settings['window']}, seed {settings['seed']}")
    table.add_row("calls a sample", f"{costs['calls_mean']:.2f}, {costs['speedup']:.2f}× fewer")
    table.add_row("states evaluated a sample", f"{costs['evaluations_mean']:.1f}")
    table.add_row("drafts kept a round", f"{costs['accepted_mean']:.2f}")
    seconds = [run["seconds"] for run in manifest["runs"] if run["seconds"] is not None]
    table.add_row("runs", f"{len(manifest['runs'])}, {sum(seconds):.1f} s")
    if law is not None:
        verdict = "passed" if law.passed else "FAILED"
        table.add_row("law", f"{verdict}: {law.tests} tests, smallest p-value {law.smallest_p:.2g}")
    Console().print(table)
    for failure in dataset.failures[:most]:
        print(f"sample {failure.index} (seed {failure.seed}) broke: {failure.error}", file=sys.stderr)
    if len(dataset.failures) > most:
        print(f"and {len(dataset.failures) - most} more: see {dataset.out / 'manifest.json'}", file=sys.stderr)


class _DatasetBar:
    """Samples, their rate and what is left of the time; calls a sample and drafts kept a round."""

    def __init__(self, count: int, *, disable: bool) -> None:
        self.count, self.disable = count, disable or None
        self.bar: tqdm | None = None

    def __enter__(self) -> _DatasetBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, status: Status) -> None:
        if self.bar is None:  # what an earlier run has drawn says nothing of this one's rate
            self.bar = tqdm(total=self.count, initial=status.samples, unit="sample", disable=self.disable)
        if status.samples:
            told = f"{status.calls_mean:.1f} calls, {status.accepted_mean:.2f} kept a round"
            self.bar.set_postfix_str(told, refresh=False)
        self.bar.update(status.samples - self.bar.n)


class _RunBars:
    """A live bar per sampler: transitions committed, calls, drafts kept a round."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self.total, self.disable = total, disable or None
        self.bar: tqdm | None = None
        self.name, self.calls, self.rounds, self.kept = "", 0, 0, 0

    def __enter__(self) -> _RunBars:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, name: str, commit: Commit) -> None:
        if name != self.name:
            self.__exit__()
            self.bar = tqdm(total=self.total, desc=name, unit="step", disable=self.disable)
            self.name, self.calls, self.rounds, self.kept = name, 0, 0, 0
        self.calls += 1
        self.rounds += len(commit.committed)
        committed = int(commit.committed.sum())
        self.kept += committed - len(commit.committed)
        assert self.bar is not None
        self.bar.set_postfix_str(
            f"{self.calls} calls, {self.kept / self.rounds:.2f} kept a round", refresh=False
        )
        self.bar.update(committed)


@app.command("tune")
def tune_command(
    steps: Length = 100,
    slots: Annotated[int, typer.Option(min=1, help="Samples under way at a time; 1 asks for latency.")] = 1,
    window: Annotated[list[int], typer.Option(min=1, help="Windows to try; may be given several times.")] = [  # noqa: B006
        *WINDOWS
    ],
    model: ModelFolder = None,
    target: Annotated[
        str | None, typer.Option(help="Your own target instead, as 'package.module:name'.")
    ] = None,
    device: Device = "cpu",
    half: Annotated[bool, typer.Option("--half", help="Run the network in bfloat16.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the network with torch.compile.")
    ] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Replay rounds as CUDA graphs.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure which window is fastest here, and whether speculation pays at all."""
    from foresample import pretrained

    try:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
        if target is not None:
            chain = _load_target(target)
        else:
            dtype = torch.bfloat16 if half else torch.float32
            source = pretrained.load(model or pretrained.EMBEDDED, device, dtype, compiled=compiled)
            chain = source.target(steps)
        with tqdm(disable=as_json or None, leave=False, bar_format="{desc} {elapsed}") as bar:
            tuning = tune(
                chain, slots=slots, windows=window, graph=graph, progress=lambda what: bar.set_description(what)
            )
    except (ImportError, OSError, ValueError, RuntimeError, FloatingPointError) as error:
        raise fail(str(error)) from None
    result = json.dumps({**benches.provenance(), **json.loads(tuning.to_json())}, indent=2)
    if out is not None:
        out.write_text(result + "\n")
    if as_json:
        print(result)
        return
    Console().print(_tuning_table(tuning))
    print(tuning.advice + ".")


def _tuning_table(tuning: Tuning) -> Table:
    table = Table(
        title=f"{tuning.steps} steps, {tuning.slots} at a time",
        caption="states: in a call, at most\ngain: on the clock, predicted",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("window", "states", "ms a call", "ms a round", "calls", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("–", str(tuning.slots), "", f"{1e3 * tuning.step_seconds:.2f}", str(tuning.steps), "1.00×")
    for trial in tuning.trials:
        table.add_row(
            str(trial.window),
            str(trial.states),
            f"{1e3 * trial.call_seconds:.2f}",
            f"{1e3 * trial.round_seconds:.2f}",
            f"{trial.calls:.1f}",
            f"{trial.gain:.2f}×",
            style="bold" if trial.window == tuning.window else "",
        )
    return table


@bench_app.command("mixture")
def bench_mixture(
    dim: Dim = 500,
    churn: Churn = 0.1,
    steps: Steps = 30,
    window: Annotated[list[int], typer.Option(min=1, help="May be given several times.")] = [5, 9, 14],  # noqa: B006
    samples: Annotated[int, typer.Option(min=2)] = 100,
    reuse: Annotated[str, typer.Option(help="Prediction that is reused: v, x0 or eps.")] = "v",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for a result file and a plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """The Gaussian mixture of the draft-tree papers: closed form, so that anyone can compare."""
    kind = _kind(reuse)
    try:
        target = GaussianMixture.of_draft_trees(dim).flow(steps, churn, reuse=kind)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise fail(str(error)) from None
    settings = {
        "target": "mixture of the draft-tree papers, churned flow",
        "dim": dim,
        "churn": churn,
        "steps": steps,
        "samples": samples,
        "reuse": reuse,
        "seed": seed,
    }
    with tqdm(total=len(window) * len(benches.METHODS), disable=as_json or None, leave=False) as bar:

        def progress(what: str) -> None:
            bar.update(1)
            bar.set_description(what)

        rows = benches.bench(target, window, samples, seed, progress=progress)

    title = f"Gaussian mixture, d = {dim}, churn {churn:g}, {steps} steps, {reuse} reused"
    result = benches.as_json(settings, rows)
    if as_json:
        print(result)
    else:
        Console().print(_bench_table(title, rows))
    if out is not None:
        name = f"mixture-d{dim}-T{steps}-{reuse}"
        (out / f"{name}.json").write_text(result + "\n")
        benches.plot(out / f"{name}.png", title, rows)
        if not as_json:
            print(f"wrote {out / name}.json and {out / name}.png")


def _bench_table(title: str, rows: list[benches.Row]) -> Table:
    table = Table(
        title=title,
        caption="speed-up: transitions of the chain / calls; evals: states evaluated a sample\n"
        "kept: drafts accepted a round; s: seconds for all samples",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in ("window", "speed-up", "calls", "evals", "kept", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].window != row.window
        table.add_row(
            row.method,
            str(row.window),
            f"{row.speedup:.2f} ± {row.speedup_error:.2f}",
            f"{row.calls:.2f}",
            f"{row.evaluations:.1f}",
            f"{row.accepted:.2f}",
            f"{row.seconds:.2f}",
            style="bold" if last else "",
            end_section=last,
        )
    return table


@app.command("check")
def check_command(
    target: Annotated[
        str,
        typer.Argument(
            help="'flow', 'vp' or 'langevin' on a 2-D mixture, or your own as 'package.module:name'."
        ),
    ] = "flow",
    window: Annotated[int, typer.Option(min=1)] = 14,
    drafter: Annotated[str, typer.Option(help=", ".join(DRAFTERS))] = "replay",
    block: Annotated[int | None, typer.Option(min=1, help="Block length; the whole window by default.")] = None,
    recycle: Annotated[bool, typer.Option(help="Recycle rejected noise, or draw fresh noise.")] = True,
    samples: Annotated[int, typer.Option(min=10)] = 5000,
    batch: Annotated[int, typer.Option(min=1, help="Samples drawn at a time.")] = 1000,
    level: Annotated[float, typer.Option(help="False-alarm probability of the law tests.")] = LEVEL,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Test that speculative sampling of a target is exact. Exit status 1 if it is not."""
    if drafter not in DRAFTERS:
        raise fail(f"--drafter takes one of {', '.join(DRAFTERS)}, not {drafter!r}")
    chain = _load_target(target)
    with tqdm(total=2 * samples * len(chain.std), unit="step", disable=as_json or None, leave=False) as bar:
        try:
            result = check(
                chain,
                window=window,
                drafter=DRAFTERS[drafter],
                block=block,
                recycle=recycle,
                samples=samples,
                batch=batch,
                seed=seed,
                level=level,
                progress=bar.update,
            )
        except (TypeError, ValueError, FloatingPointError) as error:
            bar.close()
            raise fail(str(error)) from None
    print(json.dumps({**benches.provenance(), **json.loads(result.to_json())}, indent=2) if as_json else result)
    if not result.passed:
        raise typer.Exit(1)


@app.command("report")
def report_command(
    results: Annotated[
        Path | None, typer.Option(help="Folder of result files; the checkout's benchmarks/results by default.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of sample sheets; the checkout's docs/pictures by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Turn saved results into one self-contained web page."""
    from foresample import webpage

    if pictures is not None and not pictures.is_dir():
        raise fail(f"no folder of pictures at {pictures}; name another with --pictures, or leave it out")
    try:
        webpage.write(out, results or webpage.RESULTS, pictures or webpage.PICTURES)
    except webpage.ResultError as error:
        raise fail(str(error)) from None
    except OSError as error:
        raise fail(f"cannot write {out} ({error.strerror}); name another file with --out") from None
    print(f"wrote {out}")


def _load_target(name: str) -> Target:
    """A built-in chain by name, or the object (or factory without arguments) at 'package.module:name'."""
    mixture = GaussianMixture.of_draft_trees(2)
    if name == "flow":
        return mixture.flow(16, 1.0)
    if name == "vp":
        return mixture.vp(torch.linspace(0.01, 0.99, 16, dtype=torch.float64))
    if name == "langevin":
        return mixture.langevin(16, 0.01)
    if name == "embedded":
        from foresample import pretrained

        return pretrained.load().target(20)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise fail(f"{name!r} is none of {', '.join(CHAINS)}; name your own target as 'package.module:name'")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute)
        target = found() if callable(found) and not isinstance(found, Target) else found
        require_target(target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise fail(f"cannot load {name!r}: {error}") from None
    return cast(Target, target)
