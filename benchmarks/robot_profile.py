"""Where the time of one network call of LeRobot's policy goes, by kind of kernel (torch.profiler)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kinds.robots import CallKernel, CallProfileRow
from benchmarks.results import RESULTS, save
from benchmarks.robot_clock import PRECISIONS, load
from benchmarks.timing import take_turns
from foresample.backends.graphs import capture
from recipes import metaworld

CALLS = 10  # profiled
TIMED = 30  # without the profiler
SHOWN = 8  # kernels named in a row
STATES = (1, 33, 100)
PRODUCTS, NORMS, ELEMENTS, COPIES, OTHER = (
    "matrix products and convolutions",
    "normalisation",
    "elementwise",
    "copies and layout",
    "other",
)
# The first that occurs in a kernel's name says its kind. Inductor names a kernel after everything fused into it, so
# the prefix that says what the kernel itself is comes first.
WORDS = (
    ("triton_tem", PRODUCTS),
    ("triton_mm", PRODUCTS),
    ("triton_red", NORMS),
    ("triton_per", NORMS),
    ("triton_poi", ELEMENTS),
    ("conv_transpose", PRODUCTS),
    ("memcpy", COPIES),
    ("memset", COPIES),
    ("nchwtonhwc", COPIES),
    ("nhwctonchw", COPIES),
    ("nhwcaddpadding", COPIES),
    ("transpose", COPIES),
    ("cat", COPIES),
    ("copy", COPIES),
    ("norm", NORMS),
    ("rowwisemoments", NORMS),
    ("computefusedparams", NORMS),
    *((word, PRODUCTS) for word in ("conv", "gemm", "gemv", "addmm", "::mm", "xmma", "cutlass", "nvjet")),
    *((word, PRODUCTS) for word in ("cudnn", "splitk", "sm80_", "sm90_")),
    *((word, ELEMENTS) for word in ("elementwise", "mish", "::add", "::mul", "::sin", "::cos", "::exp")),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, or on a CPU of an operator."""
    lower = kernel.lower()
    return next((kind for word, kind in WORDS if word in lower), OTHER)


def kernels(work: Callable[[], object], calls: int, cuda: bool) -> dict[str, tuple[float, float]]:
    """By name: the kernels of one call, and their milliseconds; on a CPU operators without those they call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as watched:
        for _ in range(calls):
            work()
        if cuda:
            torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in watched.events() or ():
        if (event.device_type == DeviceType.CUDA) is not cuda:
            continue
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        count, ms = found.get(event.name, (0.0, 0.0))
        found[event.name] = count + 1 / calls, ms + us / 1000 / calls
    return found


def row_of(network: Callable[..., Tensor], inputs: tuple[Tensor, ...], graph: bool) -> CallProfileRow:
    """One call on so many states."""

    def call() -> Tensor:
        with torch.no_grad():
            return network(inputs[0], inputs[1], global_cond=inputs[2])

    with FlopCounterMode(display=False) as flops:
        own = getattr(network, "_orig_mod", network)
        with torch.no_grad():
            own(inputs[0], inputs[1], global_cond=inputs[2])
    work: Callable[[], object] = call
    if graph:
        work = capture(call, inputs[0].device).replay
    ms = 1000 * take_turns({"call": lambda turn: work()}, warm=3, least=TIMED, most=TIMED).median("call")
    # Some profilers see no kernels in a replayed graph; uncaptured, the same kernels run.
    found = kernels(work, CALLS, inputs[0].is_cuda) or kernels(call, CALLS, inputs[0].is_cuda)
    named = [CallKernel(name=n[:120], kind=kind_of(n), count=c, ms=t) for n, (c, t) in found.items() if t > 0]
    named.sort(key=lambda one: -one.ms)
    kinds = {kind: of_kind(named, kind) for kind in (PRODUCTS, NORMS, ELEMENTS, COPIES, OTHER)}
    return CallProfileRow(
        states=len(inputs[0]),
        ms=ms,
        gflop=flops.get_total_flops() / 1e9,
        kinds=[one for one in kinds.values() if one.count],
        longest=named[:SHOWN],
    )


def of_kind(named: Iterable[CallKernel], kind: str) -> CallKernel:
    """All kernels of a kind together."""
    mine = [one for one in named if one.kind == kind]
    return CallKernel(
        name=kind, kind=kind, count=sum(one.count for one in mine), ms=sum(one.ms for one in mine)
    )


def read_once(weights: list[Tensor]) -> float:
    """Milliseconds in which the device reads all weights: their sum, in one kernel a piece of memory."""
    flat = torch.cat([weight.flatten() for weight in weights])
    work: Callable[[], object] = flat.sum
    if flat.is_cuda:
        work = capture(work, flat.device).replay
    return 1000 * take_turns({"read": lambda turn: work()}, warm=3, least=TIMED, most=TIMED).median("read")


def profile(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    device: str = "cpu",
    precision: Annotated[str, typer.Option(help=f"of the network: {' or '.join(PRECISIONS)}")] = "float32",
    channels_last: Annotated[bool, typer.Option(help="the layout of the network's convolutions")] = False,
    states: Annotated[list[int] | None, typer.Option("--states", help="states of a call")] = None,
    compiled: Annotated[bool, typer.Option(help="the network compiled, which takes up to a minute")] = False,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-profile",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Where the time of one network call goes: on a GPU replayed from a CUDA graph."""
    torch.manual_seed(0)
    cuda = torch.device(device).type == "cuda"
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True  # as LeRobot's scripts do
    served = load(policy, device, precision, channels_last).policy
    plain, config = served.diffusion.unet, served.config
    network: Any = torch.compile(plain) if compiled else plain
    weights = [w for w in plain.parameters() if w.dim()]
    widths = sum(one.shape[0] for one in config.input_features.values()) * config.n_obs_steps
    settings = {
        "policy": policy.name,
        "parameters": sum(w.numel() for w in weights),
        "weight_bytes": sum(w.numel() * w.element_size() for w in weights),
        "read_ms": read_once(weights),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "precision": precision,
        "channels_last": channels_last,
        "tf32": cuda and precision == "float32",
        "run": " + ".join([*["compiled"] * compiled, *["graph"] * cuda]) or "eager",
        "calls": CALLS,
    }
    gigabytes = settings["weight_bytes"] / 1e9
    print(f"{gigabytes:.2f} GB of weights, read once in {settings['read_ms']:.2f} ms", flush=True)
    rows = []
    for count in states or STATES:
        action = config.output_features["action"].shape[0]
        x, c = torch.randn(count, config.horizon, action), torch.randn(count, widths)
        time = torch.full((count,), 50)
        rows.append(row_of(network, (x.to(device), time.to(device), c.to(device)), cuda))
        print(shown(rows[-1], gigabytes), flush=True)
        save(out / f"{name}.json", "robot-profile", settings, rows=rows)


def shown(row: CallProfileRow, gigabytes: float) -> str:
    """A short table."""
    speed = f"{row.gflop / row.ms:.2f} TFLOP/s, weights at {gigabytes / row.ms:.2f} TB/s"
    lines = [f"{row.states} states: {row.ms:.3f} ms, busy {row.busy:.0%}, {row.gflop:.1f} GFLOP, {speed}"]
    lines += [f"  {one.name:34s} {one.count:6.1f} kernels {one.ms:8.3f} ms" for one in row.kinds]
    lines += [f"    {one.count:5.1f} × {one.name[:80]}: {one.ms:.3f} ms" for one in row.longest]
    return "\n".join(lines)
