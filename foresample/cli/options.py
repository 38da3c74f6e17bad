"""The options of every command: one dataclass each, whose fields are the options and whose docstring is the help.

`check` refuses options that are wrong on any machine and for any target; other errors are found where an option is
used. Nothing here imports torch, so that wrong input is refused at once; tests compare the copied constants with the
library's.
"""

import sys  # and no annotations from __future__: typer reads those below
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

import typer

from foresample.cli.console import require_file, require_folder, require_modules

MIXTURES = ("flow", "vp", "langevin")
Kind = Literal["x0", "eps", "v", "score"]  # foresample.chains.Kind
DRAFTERS = ("replay", "replay-plain", "head", "parent", "nearest")
WINDOW, LEVEL = "16", 1e-3  # foresample.settings, foresample.checks.findings


def _path(text: Any) -> Path | None:
    """The path of a file or folder to write; an empty text would be the current folder."""
    if text == "":
        raise typer.BadParameter("it is empty: name a folder or a file")
    return None if text is None else Path(text)


_of_target = partial(typer.Option, rich_help_panel="What to sample")
_of_execution = partial(typer.Option, rich_help_panel="How to run it")
_output = partial(typer.Option, parser=_path, metavar="PATH")


def _checked_window(value: Any, least: int) -> Any:
    several = isinstance(value, list)
    for text in value if several else [value]:
        number = text.isdecimal() and len(text) < 100 and int(text) >= least
        if number or text == "auto" or (not several and not text.isdecimal() and Path(text).is_file()):
            continue
        more = "" if several else ", nor a file of foresample tune --out"
        raise typer.BadParameter(f"{text!r} is neither a whole number of at least {least} nor auto{more}")
    return value


def _require_window(value: Any) -> Any:
    return _checked_window(value, least=1)


def _require_dataset_window(value: Any) -> Any:
    return _checked_window(value, least=0)


def _model(shown: str | bool) -> Any:
    return _of_target(help="A diffusers DDPM folder.", show_default=shown)


def _steps(default: int) -> Any:
    shown = f"{default}; 16 for mixtures"
    return _of_target(min=1, max=10**6, help="Transitions of the chain.", show_default=shown)


def _slots(more: str = "", *, shown: str | bool = True) -> Any:
    return _of_execution(min=1, help=f"Samples under way at a time{more}.", show_default=shown)


_of_window = partial(_of_execution, metavar="N|auto|FILE")
_DRAFTED = "Transitions drafted in a round: a number, auto (measures the fastest) or a file of tune --out"
Window = Annotated[str, _of_window(callback=_require_window, help=f"{_DRAFTED}.")]
DatasetWindow = Annotated[
    str, _of_window(callback=_require_dataset_window, help=f"{_DRAFTED}; 0 draws sequentially.")
]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random number.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, _output(help="Also write the findings to this file, as JSON.")]


class Options:
    """The options of one command."""

    def check(self) -> None:
        """Refuse options that are wrong on any machine."""


@dataclass(kw_only=True)
class TargetOptions(Options):
    """The target to sample, and how to run it."""

    default_steps: ClassVar[int] = 100

    model: Annotated[Path | None, _model("the embedded Fashion-MNIST model")] = None
    target: Annotated[
        str | None,
        _of_target(
            "--target",
            help="Your own target instead of a model: 'package.module:name' of it or of a function that makes it. "
            "Or a built-in one: flow, vp, langevin (mixtures in 2-D), embedded.",
        ),
    ] = None
    steps: Annotated[int | None, _steps(100)] = None
    label: Annotated[
        str | None, _of_target(help="Class of the model, by name or number.", show_default="all in turn")
    ] = None
    reuse: Annotated[
        str | None,
        _of_target(help="Quantity that drafts reuse: x0, eps, v or score.", show_default="x0"),
    ] = None
    device: Annotated[str | None, _of_execution(help="cpu, cuda or cuda:N.", show_default="cpu")] = None
    half: Annotated[bool, _of_execution("--half", help="Run the model's network in bfloat16.")] = False
    compiled: Annotated[bool, _of_execution("--compiled", help="Compile the model's network.")] = False
    graph: Annotated[bool, _of_execution("--graph", help="Replay rounds as a CUDA graph.")] = False
    as_json: AsJson = False

    @property
    def is_model(self) -> bool:
        """Whether the target is a model's folder."""
        return self.target is None or self.target == "embedded"

    def check(self) -> None:
        if self.device is not None:
            kind, colon, number = self.device.partition(":")
            if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
                raise ValueError(f"--device takes cpu, cuda or cuda:N, not {self.device!r}")
        if self.model is not None and self.target is not None:
            raise ValueError("--model and --target both say what to sample: give one of them")
        self._check_graph()
        if self.is_model:
            require_modules("diffusers", "safetensors")
            require_kind(self.reuse or "x0")
            index = self.model and self.model.resolve() / "model_index.json"
            if index and not index.exists():
                raise FileNotFoundError(f"{index} does not exist: not the folder of a diffusers DDPM pipeline")
            return
        refused = ["label", "reuse", "half", "compiled"]
        if self.target not in MIXTURES:
            module, _, name = str(self.target).partition(":")
            if not (module and name):
                raise ValueError(
                    f"--target {self.target!r} is unknown: take one of {', '.join(MIXTURES)}, embedded, or name your "
                    "own as 'package.module:name'"
                )
            refused.append("steps")
        given = [f"--{name}" for name in refused if getattr(self, name)]
        if given:
            them = "it" if len(given) == 1 else "them"
            raise ValueError(
                f"{' and '.join(given)} cannot apply to {self._named_target}: leave {them} out, or name a --model"
            )
        if self.target not in MIXTURES:
            if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
                sys.path.insert(0, here)
            top = module.partition(".")[0]
            if top and top not in sys.modules and find_spec(top) is None:
                raise ValueError(f"cannot load {self.target!r}: ModuleNotFoundError: No module named {top!r}")

    @property
    def _named_target(self) -> str:
        return f"--target {self.target}"

    def _check_graph(self) -> None:
        """Refuse CUDA graphs on a CPU. A target of the user's own may be on a GPU whatever --device says."""
        if self.graph and self.target in MIXTURES:
            raise ValueError(f"--graph cannot apply to {self._named_target} on the CPU: leave it out")
        if self.graph and self.is_model and self.device in (None, "cpu"):
            raise ValueError("--graph cannot apply to the CPU: add --device cuda, or leave --graph out")


def require_kind(reuse: str) -> Kind:
    """The kind of prediction to reuse, or an error."""
    if reuse not in get_args(Kind):
        raise ValueError(f"--reuse takes one of {', '.join(get_args(Kind))}, not {reuse!r}")
    return cast(Kind, reuse)


@dataclass(kw_only=True)
class Sample(TargetOptions):
    """Draw exact samples from a diffusion model, in few network calls."""

    count: Annotated[int, typer.Option(min=1, help="Samples to draw.")] = 64
    window: Window = WINDOW
    slots: Annotated[int | None, _slots(shown="all")] = None
    seed: Seed = 0
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run the sequential sampler, and compare costs and times.")
    ] = False
    out: Annotated[Path, _output(help="Folder for samples, pictures and report.")] = Path("out")

    files: ClassVar[tuple[str, ...]] = (
        "samples.safetensors",
        "report.json",
        "run.png",
        "samples.png",
        "compare.png",
    )
    """Names of the files that a run may write into its folder."""

    def check(self) -> None:
        super().check()
        require_modules("safetensors", "matplotlib")
        require_folder(self.out, *self.files)


@dataclass(kw_only=True)
class Generate(TargetOptions):
    """Draw a dataset into shards, or resume one. Exit status 3 if samples broke, 1 if the distribution test failed."""

    default_steps: ClassVar[int] = 250

    count: Annotated[int, typer.Option(min=1, help="Samples in the dataset.")]
    out: Annotated[Path, _output(help="The dataset's folder; run the same command again to resume.")]
    steps: Annotated[int | None, _steps(250)] = None
    window: DatasetWindow = "auto"
    slots: Annotated[int, _slots(", in each worker")] = 64
    shard: Annotated[int, typer.Option(min=1, help="Samples in each file.")] = 1000
    seed: Seed = 0
    law: Annotated[
        int, typer.Option(min=0, help="Sequential samples to compare the finished dataset with.")
    ] = 0
    ray: Annotated[str | None, typer.Option(help="Run on Ray: auto, or a cluster's address.")] = None
    cpus: Annotated[
        int | None, typer.Option(min=1, help="On Ray, CPUs for each worker, which then uses no GPU.")
    ] = None

    def check(self) -> None:
        super().check()
        require_modules("safetensors", *(["ray"] if self.ray is not None else []))
        if self.cpus is not None and self.ray is None:
            raise ValueError("--cpus applies to workers on Ray only: add --ray auto, or leave --cpus out")
        require_folder(self.out)


@dataclass(kw_only=True)
class Inspect(Options):
    """Verify a dataset, show its contents, and paint a contact sheet. Exit status 1 if it is not complete."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that foresample generate wrote.")]
    pictures: Annotated[int, typer.Option(min=1, help="Most pictures on the contact sheet.")] = 100
    as_json: AsJson = False

    def check(self) -> None:
        require_modules("safetensors")
        try:
            (self.folder / "manifest.json").lstat()
        except FileNotFoundError:
            if not any(self.folder.glob("shard-*.safetensors")):
                raise FileNotFoundError(
                    f"{self.folder} holds no manifest.json: not a folder of foresample generate"
                ) from None
        except OSError:
            pass  # reading the file raises the error that explains it


@dataclass(kw_only=True)
class Tune(TargetOptions):
    """Measure which window is fastest here, and whether speculation is faster at all.

    With several --slots it also measures throughput and latency for each.
    """

    window: Annotated[
        list[str],
        _of_execution(
            metavar="N|auto",
            callback=_require_window,
            help="Window to try; give the option several times for several.",
            show_default="auto: 2, 4, 8 … 64",
        ),
    ] = ("auto",)  # type: ignore[assignment]  # dataclasses refuse a list
    slots: Annotated[
        list[int], _slots("; 1 measures latency; give several to compare throughput and latency", shown="1")
    ] = (1,)  # type: ignore[assignment]
    within: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="With several --slots, milliseconds within which 95 in 100 samples must finish."
        ),
    ] = None
    out: OutFile = None

    def check(self) -> None:
        if self.within is not None and len(set(self.slots)) == 1:
            raise ValueError(
                "--within chooses between several --slots: name at least two, as in --slots 1 --slots 16"
            )
        super().check()
        if self.out is not None:
            require_file(self.out)


@dataclass(kw_only=True)
class Check(TargetOptions):
    """Test that speculative sampling of a target is exact. Exit status 1 if it is not."""

    default_steps: ClassVar[int] = 20

    name: Annotated[str | None, typer.Argument(metavar="TARGET", help="As --target; flow by default.")] = None
    model: Annotated[Path | None, _model(False)] = None
    steps: Annotated[int | None, _steps(20)] = None
    window: Window = WINDOW
    slots: Annotated[int, _slots()] = 1000
    drafter: Annotated[str, typer.Option(help=", ".join(DRAFTERS))] = "replay"
    block: Annotated[int | None, typer.Option(min=1, help="Block length; the whole window by default.")] = None
    recycle: Annotated[bool, typer.Option(help="Recycle rejected noise, or draw fresh noise instead.")] = True
    samples: Annotated[
        int, typer.Option(min=10, help="Speculative samples to draw, and as many sequential ones.")
    ] = 5000
    level: Annotated[float, typer.Option(help="False-alarm probability of the tests.")] = LEVEL
    seed: Seed = 0
    out: OutFile = None

    by_default: bool = field(init=False, default=False)
    """True if no target was named."""

    @property
    def _named_target(self) -> str:
        return f"{self.target}, the default target" if self.by_default else super()._named_target

    def check(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ValueError(f"--drafter takes one of {', '.join(DRAFTERS)}, not {self.drafter!r}")
        if not 0 < self.level < 1:
            raise ValueError(f"--level is a probability between 0 and 1, not {self.level}")
        if self.graph:
            raise ValueError(
                "--graph cannot apply to check, which examines every round: leave it out, or test samples of captured "
                "rounds with 'foresample generate --graph --law 1000'"
            )
        if self.name is not None and self.target is not None:
            raise ValueError(
                f"{self.name!r} and --target {self.target} both say what to check: give one of them"
            )
        self.target = self.name or self.target
        if self.target is None and self.model is None:
            self.target, self.by_default = "flow", True
        super().check()
        if self.out is not None:
            require_file(self.out)


@dataclass(kw_only=True)
class PolicyServer(Options):
    """Start LeRobot's policy server with accelerated diffusion policies; options after -- go to LeRobot."""

    lerobot: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Options of LeRobot's server.")
    ] = None
    window: Window = WINDOW
    warm: Annotated[bool, typer.Option(help="Draft the first window of a plan from the plan before it.")] = True
    graph: Annotated[bool, typer.Option("--graph", help="On a GPU, replay rounds as CUDA graphs.")] = False
    prior: Annotated[Path | None, typer.Option(help="File of a prior, written by its save method.")] = None
    pilots: Annotated[int | None, typer.Option(min=2, help="Number of first plans to fit a prior on.")] = None

    def check(self) -> None:
        for name in ("lerobot", "grpc"):
            if find_spec(name) is None:
                raise no_server(name)


def no_server(name: str | None) -> ImportError:
    """The error for a missing module: LeRobot imports all of its dependencies, used or not."""
    return ImportError(
        f"the policy server needs {name}, which is not installed: pip install 'lerobot[async]' brings LeRobot, its "
        "server and everything they import (docs/robots.md)"
    )


@dataclass(kw_only=True)
class Doctor(Options):
    """Show the packages, devices and fast paths of this installation, and test them. Exit status 1 if a test fails."""

    test: Annotated[bool, typer.Option("--test/--no-test", help="Also test that sampling here is exact.")] = (
        True
    )
    samples: Annotated[int, typer.Option(min=100, help="Samples of the self-test on each device.")] = 2000
    as_json: AsJson = False


@dataclass(kw_only=True)
class Demo(Options):
    """Plan a robot's pen strokes and draw a picture, each sequentially and speculatively, and show both on one page.

    Needs no GPU and takes less than a minute. Exit status 1 if the exactness check fails.
    """

    out: Annotated[Path, _output(help="The page to write.")] = Path("out/demo.html")
    seed: Seed = 0

    def check(self) -> None:
        require_file(self.out)
        require_modules("diffusers", "safetensors", "PIL")


COMMANDS: dict[str, type[Options]] = {
    "demo": Demo,
    "sample": Sample,
    "generate": Generate,
    "inspect": Inspect,
    "tune": Tune,
    "check": Check,
    "policy-server": PolicyServer,
    "doctor": Doctor,
}
