"""OpenAI's diffusion class: its own loop with the same noise, every step of a path, the distribution, refusals.

The stand-in of `tests.support.openai` is tested here, and real copies of the class by `python -m tests.openai`.
"""

from __future__ import annotations

import copy as copies_of
import math
import pickle
from dataclasses import replace
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.checks.kolmogorov import ks_two_sample
from foresample.core.round import Padded
from foresample.engine import Engine, tuning
from foresample.integrations.packages.openai import OpenAILoop
from tests.support.openai import Copy, Guided, Net, copies

SHAPE = (6, 1, 2)
EVERY_THIRD = range(0, 60, 3)
CASES: list[dict[str, Any]] = [
    {"predicts": "EPSILON"},
    {"predicts": "START_X", "variance": "FIXED_LARGE"},
    {"predicts": "PREVIOUS_X", "steps": 30},
    {"predicts": "EPSILON", "variance": "FIXED_LARGE", "keep": EVERY_THIRD},
    {"predicts": "EPSILON", "variance": "LEARNED_RANGE", "keep": EVERY_THIRD, "rescale": True},
    {"predicts": "START_X", "variance": "LEARNED_RANGE", "steps": 30},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_denoised": False},
    {"denoised_fn": lambda x0: 0.5 * x0.sign() * x0.abs().sqrt()},
    {"cond_fn": lambda x, t, y=None: towards(x, t, y)},
]


def towards(x: Tensor, t: Tensor, y: Any = None) -> Tensor:
    """The gradient of a log probability, as a classifier's is taken."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        log_probability = -3 * (given - 1).cosh().log().sum()
        return torch.autograd.grad(log_probability, given)[0]


@pytest.fixture(params=copies(), ids=str, scope="module")
def copy(request: pytest.FixtureRequest) -> Copy:
    return request.param


def made(copy: Copy, **case: Any) -> Any:
    """A diffusion of this copy; the test is skipped where the copy does not have the case."""
    if case.get("predicts") not in (None, *copy.plain.ModelMeanType.__members__):
        pytest.skip(f"{copy} has no {case['predicts']}")
    return copy.make(**case)


def asked(copy: Copy, count: int = SHAPE[0], spread: float = 0.6, **options: Any) -> dict[str, Any]:
    """Arguments of the loops; each sample has a condition of its own, some of which lead to clipping."""
    for name in options:
        if not copy.takes(name):
            pytest.skip(f"{copy} has no {name}")
    shift = torch.linspace(-spread, spread, count).view(count, 1, 1)
    return {"model_kwargs": {"y": {"shift": shift}}} | options


def drawn(diffusion: Any, net: Any, **given: Any) -> Tensor:
    torch.manual_seed(3)
    return diffusion.p_sample_loop(net, SHAPE, **given)


@pytest.fixture(params=["loose", "fixed"])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which slots engines have: those of a CPU or those of a GPU, which evaluate states that nobody needs."""
    own = Engine.__init__

    def made(self: Engine, *given: Any, **settings: Any) -> None:
        own(self, *given, **settings)
        self.speculation = replace(self.speculation, layout=Padded())

    if request.param == "fixed":
        monkeypatch.setattr(Engine, "__init__", made)
    return request.param


# ------------------------------------------------------------------ its own loop


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options) or "plain")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_its_loop_with_the_same_noise(copy: Copy, case: dict[str, Any], options: dict[str, Any]) -> None:
    diffusion, given = made(copy, **case), asked(copy, **options)
    net, start = Net(diffusion), torch.randn(SHAPE)
    noise = list(torch.randn(diffusion.num_timesteps, *SHAPE))
    theirs: list[Tensor] = []

    def walk(loop: OpenAILoop, drawing: Any, window: int) -> Tensor:
        target, row = drawing.target, torch.arange(SHAPE[0])
        x = target.start(torch.zeros(SHAPE), row)
        for k, std in enumerate(target.std):
            step, extra = torch.full_like(row, k), noise[k].roll(1, 0)
            given = {} if target.extra is None else {"extra": extra}
            mean = target.mean(x, target.predict(x, step, row, **given), step, **given)
            theirs.append(noise[k])
            if given and std > 0:  # what theirs must draw to come to the same
                total = target.chain.variance(target.output(x, step, row), step).sqrt()
                theirs[-1] = ((total**2 - std**2).sqrt() * extra + std * noise[k]) / total
            x = mean + std * noise[k]
        return x

    with fs.accelerate(diffusion), mock.patch.object(OpenAILoop, "_draw", walk):
        ours = diffusion.p_sample_loop(net, SHAPE, noise=start, **given)
    with mock.patch("torch.randn_like", side_effect=theirs):
        expected = diffusion.p_sample_loop(net, SHAPE, noise=start, **given)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_step_of_a_path_is_the_object_s(copy: Copy, case: dict[str, Any], slots: str) -> None:
    """In order, the last one being what p_sample_loop returns; estimates are those at the state before."""
    diffusion, given = made(copy, **case), asked(copy, noise=torch.randn(SHAPE))
    net = Net(diffusion)
    with fs.accelerate(diffusion, window=6):
        last = drawn(diffusion, net, **given)
        torch.manual_seed(3)
        path = list(diffusion.p_sample_loop_progressive(net, SHAPE, **given))
    assert len(path) == diffusion.num_timesteps
    assert torch.equal(path[-1]["sample"], last)
    assert innovations(diffusion, net, path, given).std() == pytest.approx(1, abs=0.1)


def innovations(diffusion: Any, net: Any, path: list[dict[str, Tensor]], given: dict[str, Any]) -> Tensor:
    """The noise that a path adds to the object's own means, in its own std; its estimates are the object's own."""
    x, found = given["noise"], []
    for k, step in enumerate(path):
        t = torch.full((len(x),), len(path) - 1 - k)
        own = diffusion.p_mean_variance(net, x, t, model_kwargs=given["model_kwargs"])
        torch.testing.assert_close(step["pred_xstart"], own["pred_xstart"], rtol=1e-4, atol=1e-4)
        found.append((step["sample"] - own["mean"]) / (0.5 * own["log_variance"]).exp())
        x = step["sample"]
    torch.testing.assert_close(x, own["mean"])
    return torch.stack(found[:-1])


def test_seldom_used_arguments(copy: Copy) -> None:
    """The device is the network's by default; a progress bar changes nothing; states on the way are dumped."""
    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy)
    net = Net(diffusion)
    with fs.accelerate(diffusion, window=6):
        last = drawn(diffusion, net, **given)
        assert torch.equal(drawn(diffusion, net, progress=True, device="cpu", **given), last)
        dumped = drawn(diffusion, net, **asked(copy, dump_steps=[0, 19]))
    assert len(dumped) == 2
    assert torch.equal(dumped[1], last)


def test_where_no_window_gains_its_own_loop_draws(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy)
    net = Net(diffusion)
    plain = drawn(diffusion, net, **given)
    monkeypatch.setattr(tuning, "measure", lambda *_: SimpleNamespace(window_for=lambda steps, slots: None))
    with fs.accelerate(diffusion, window="auto"):
        assert torch.equal(drawn(diffusion, net, **given), plain)
        report = diffusion.foresample_report
    assert (report.method, report.calls_mean) == ("sequential, because no window was faster", 20)
    assert report.seconds > 0.001


# ------------------------------------------------------------------ the distribution

MANY = 4000


def law(ours: Tensor, theirs: Tensor) -> float:
    """The smallest p of two-sample tests: both coordinates, their sum, and the difference of neighbouring samples."""
    views = [(v[:, 0, 0], v[:, 0, 1], v.sum((1, 2)), v[::2, 0, 0] - v[1::2, 0, 0]) for v in (ours, theirs)]
    return min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True))


def both(diffusion: Any, net: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor, fs.Report]:
    """Samples with one line, samples of its own loop, and the report."""
    torch.manual_seed(0)
    theirs = diffusion.p_sample_loop(net, (MANY, 1, 2), **given)
    with fs.accelerate(diffusion, window=6):
        ours = diffusion.p_sample_loop(net, (MANY, 1, 2), **given)
        return ours, theirs, diffusion.foresample_report


@pytest.mark.law
@pytest.mark.parametrize(
    ("case", "options"),
    [(CASES[3], {}), (CASES[4], {}), (CASES[3], OPTIONS[3])],
    ids=["fixed", "learned", "guided by a gradient"],
)
def test_one_line_and_the_distribution_is_its_own(copy: Copy, case: dict[str, Any], options: Any) -> None:
    diffusion = made(copy, **case)
    ours, theirs, report = both(diffusion, Net(diffusion), asked(copy, MANY, 0.3, **options))
    assert report.calls_mean < report.steps / 1.8
    assert law(ours, theirs) > 1e-3 / 12


@pytest.mark.law
def test_another_variance_shows_in_the_distribution(copy: Copy) -> None:
    """The broken twin of the test above: fixed_small for fixed_large, over five steps."""
    small, large = (made(copy, variance=name, keep=range(0, 60, 12)) for name in ("FIXED_SMALL", "FIXED_LARGE"))
    given = asked(copy, MANY, 0.3)
    ours, _, _ = both(small, Net(small), given)
    right, theirs, _ = both(large, Net(large), given)
    assert law(ours, theirs) < 1e-6
    assert law(right, theirs) > 1e-3 / 4


# ------------------------------------------------------------------ conditions


def test_a_sample_keeps_its_conditions_wherever_they_are(copy: Copy) -> None:
    """MDM's text embedding has the samples in its second dimension; prompts are indexed like tensors."""

    class Told(Net):
        def forward(self, x: Tensor, t: Tensor, y: Any = None) -> Tensor:
            words, mask = y["text_embed"]
            assert words.shape == (3, len(x), 1)
            assert mask.shape == (len(x), 3)
            shift = torch.linspace(-0.3, 0.3, count)
            assert torch.equal(words[0, :, 0], shift[["abcdef".index(text) for text in y["text"]]])
            return super().forward(x, t, {"shift": (words[0] * mask[:, :1]).view(-1, 1, 1)})

    diffusion = made(copy, keep=EVERY_THIRD)
    for count in (6, 1):
        shift, ones = torch.linspace(-0.3, 0.3, count), torch.ones(3, count, 1)
        y = {
            "text_embed": (ones * shift.view(1, count, 1), ones[..., 0].mT),
            "text": ["a", "b", "c", "d", "e", "f"][:count],
        }
        path: list[list[Tensor]] = []
        for net, given in ((Told(diffusion), y), (Net(diffusion), {"shift": shift.view(count, 1, 1)})):
            with fs.accelerate(diffusion, window=6):
                torch.manual_seed(1)
                steps = diffusion.p_sample_loop_progressive(net, (count, 1, 2), model_kwargs={"y": given})
                path.append([step["sample"] for step in steps])
        torch.testing.assert_close(path[0], path[1])


@pytest.mark.parametrize("variance", ["FIXED_LARGE", "LEARNED_RANGE"])
def test_guidance_that_doubles_the_batch_is_the_joint_chain(copy: Copy, variance: str, slots: str) -> None:
    """Every step of both halves is one of the doubled model, whose second half goes its own way."""
    diffusion, shape = made(copy, variance=variance, keep=EVERY_THIRD), (6, 2, 2)
    net, given = Guided(diffusion), asked(copy, noise=torch.randn(3, 2, 2).repeat(2, 1, 1), device="cpu")
    given["model_kwargs"]["cfg_scale"] = 1.5
    with fs.accelerate(diffusion, window=6):
        torch.manual_seed(3)
        last = diffusion.p_sample_loop(net.forward_with_cfg, shape, **given)
        assert diffusion.foresample_report.calls_mean < 12
        assert diffusion.foresample_report.count == 3
        torch.manual_seed(3)
        path = list(diffusion.p_sample_loop_progressive(net.forward_with_cfg, shape, **given))
    assert torch.equal(path[-1]["sample"], last)
    assert innovations(diffusion, net.forward_with_cfg, path, given).std() == pytest.approx(1, abs=0.1)
    assert (last[:3] - last[3:]).abs().max() > 0.1


@pytest.mark.law
def test_guidance_that_doubles_the_batch_has_the_joint_distribution(copy: Copy) -> None:
    diffusion = made(copy, variance="LEARNED_RANGE", keep=EVERY_THIRD)
    net, given = Guided(diffusion), asked(copy, MANY, 0.3, device="cpu")
    given["model_kwargs"]["cfg_scale"] = 1.5
    ours, theirs, report = both(diffusion, net.forward_with_cfg, given)
    assert report.calls_mean < report.steps / 2
    pairs = [torch.cat(v.chunk(2), 1) for v in (ours, theirs)]
    views = [
        (v[:, 0, 0], v[:, 1, 0], v.sum((1, 2)), v[:, 0, 0] - v[:, 1, 0], v[:, 0, 1] * v[:, 1, 1]) for v in pairs
    ]
    assert min(ks_two_sample(a.numpy(), b.numpy()) for a, b in zip(*views, strict=True)) > 1e-3 / 5


def test_a_function_is_not_taken_for_one_that_doubles_the_batch(copy: Copy) -> None:
    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy, device="cpu")
    net = Net(diffusion)
    with fs.accelerate(diffusion, window=6):
        whole = drawn(diffusion, net, **given)
        assert torch.equal(drawn(diffusion, lambda x, t, y: net(x, t, y), **given), whole)
        with pytest.raises(ValueError, match="mixes rows"):
            drawn(diffusion, lambda x, t, y: net(x.roll(1, 0), t, y), **given)


def test_a_module_that_doubles_the_batch_is_given_as_its_forward(copy: Copy) -> None:
    class Doubling(torch.nn.Module):
        def __init__(self, net: Guided) -> None:
            super().__init__()
            self.net = net

        def forward(self, *args: Any, **given: Any) -> Tensor:
            return self.net.forward_with_cfg(*args, **given)

    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy, device="cpu")
    model = Doubling(Guided(diffusion))
    given["model_kwargs"]["cfg_scale"] = 1.5
    with fs.accelerate(diffusion, window=6):
        with pytest.raises((ValueError, RuntimeError)):
            drawn(diffusion, model, **given)
        drawn(diffusion, model.forward, **given)
        assert diffusion.foresample_report.count == 3


# ------------------------------------------------------------------ changed copies


def subclass(diffusion: Any, **functions: Any) -> Any:
    """The same object of a class with these functions."""
    own = type(diffusion)
    body = {name: partial_method(getattr(own, name), function) for name, function in functions.items()}
    diffusion.__class__ = type("Mine", (own,), body | {"__module__": __name__})
    globals()["Mine"] = diffusion.__class__
    for name in functions:
        body[name].__module__, body[name].__qualname__ = __name__, f"Mine.{name}"
    return diffusion


def partial_method(own: Any, function: Any) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return function(partial(own, self), *args, **options)

    method.__signature__ = signature(own)  # type: ignore[attr-defined]
    return method


def moved(own: Any, *args: Any, **options: Any) -> Any:
    """Estimates, and the mean with them, a little further right."""
    found = own(*args, **options)
    return found | {"mean": found["mean"] + 0.1 * found["variance"]}


def test_a_changed_mean_is_drawn(copy: Copy) -> None:
    """The steps of the subclass are those of its own path: `innovations` uses the object itself."""
    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_mean_variance=moved)
    given, net = asked(copy, noise=torch.randn(SHAPE)), Net(diffusion)
    with fs.accelerate(diffusion, window=6):
        path = list(diffusion.p_sample_loop_progressive(net, SHAPE, **given))
    assert abs(innovations(diffusion, net, path, given).mean()) < 4 / math.sqrt(6 * 2 * 19)


def smaller(own: Any, *args: Any, **options: Any) -> Any:
    found = own(*args, **options)
    return found | {"sample": found["sample"] * 0.999}


def shorter(own: Any, *args: Any, **options: Any) -> Any:
    return list(own(*args, **options))[:-1]


def longer(own: Any, *args: Any, **options: Any) -> Any:
    path = list(own(*args, **options))
    return [*path, path[-1]]


def noisier_start(own: Any, model: Any, shape: Any, noise: Any = None, **options: Any) -> Any:
    return own(model, shape, noise=1.01 * noise, **options)


@pytest.mark.parametrize(
    ("name", "change", "step"),
    [
        ("p_sample", smaller, 0),
        ("p_sample_loop_progressive", shorter, 19),
        ("p_sample_loop_progressive", longer, 20),
        ("p_sample_loop_progressive", noisier_start, 0),
    ],
    ids=["smaller", "shorter", "longer", "noisier start"],
)
def test_changed_steps_are_refused_at_the_first_sample(copy: Copy, name: str, change: Any, step: int) -> None:
    diffusion = subclass(made(copy, keep=EVERY_THIRD), **{name: change})
    net = Net(diffusion)
    sentence = rf"Mine takes other steps than its chain: step {step} .*make a target with"
    with fs.accelerate(diffusion), pytest.raises(ValueError, match=sentence):
        drawn(diffusion, net, **asked(copy))
    assert net.calls == 0


def still(own: Any, model: Any, x: Tensor, t: Tensor, **options: Any) -> Any:
    """A step without noise where a condition has a mask, at timesteps below `until`; some copies inpaint so."""
    found, y = own(model, x, t, **options), options["model_kwargs"]["y"]
    names = "clip_denoised", "denoised_fn", "model_kwargs"
    given = {name: options[name] for name in names if name in options}
    mean = own.args[0].p_mean_variance(model, x, t, **given)["mean"]
    held = y["mask"] * (t < y["until"]).view(-1, 1, 1)
    return found | {"sample": torch.where(held > 0, mean, found["sample"])}


def still_path(own: Any, *args: Any, **options: Any) -> Any:
    """A loop that replaces its states where a condition has a mask."""
    for step in own(*args, **options):
        yield step | {"sample": step["sample"] * (1 - options["model_kwargs"]["y"]["mask"])}


@pytest.mark.parametrize(
    ("name", "change"), [("p_sample", still), ("p_sample_loop_progressive", still_path)], ids=["step", "loop"]
)
@pytest.mark.parametrize("before", [False, True], ids=["first call", "after a call without mask"])
def test_steps_that_depend_on_a_condition_are_refused(copy: Copy, name: str, change: Any, before: bool) -> None:
    """They are refused wherever the condition stands: the first sample has no mask."""
    diffusion = subclass(made(copy, keep=EVERY_THIRD), **{name: change})
    net, mask, given = Net(diffusion), torch.ones(SHAPE[0], 1, 1), asked(copy)
    mask[0] = 0
    y = given["model_kwargs"]["y"] | {"until": torch.full((SHAPE[0],), 60)}
    with fs.accelerate(diffusion, window=6):
        if before:
            drawn(diffusion, net, model_kwargs={"y": y | {"mask": 0 * mask}})
        with pytest.raises(ValueError, match=r"not its p_mean_variance plus noise.*entry of model_kwargs"):
            drawn(diffusion, net, model_kwargs={"y": y | {"mask": mask}})


def test_a_few_steps_that_depend_on_a_condition_are_refused(copy: Copy) -> None:
    """Every call compares all steps with its own conditions: here one sample has a mask, at the last six steps."""
    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_sample=still)
    y = asked(copy)["model_kwargs"]["y"] | {"mask": torch.eye(SHAPE[0])[4].view(-1, 1, 1)}
    with fs.accelerate(diffusion, window=6):
        until = torch.zeros(SHAPE[0], dtype=torch.long)
        drawn(diffusion, Net(diffusion), model_kwargs={"y": y | {"until": until}})
        with pytest.raises(ValueError, match=r"a step of its p_sample is not its p_mean_variance plus noise"):
            drawn(diffusion, Net(diffusion), model_kwargs={"y": y | {"until": until + 6}})


def test_noise_that_samples_share_is_refused(copy: Copy) -> None:
    def shared(own: Any, *args: Any, **options: Any) -> Any:
        with mock.patch("torch.randn_like", lambda x: torch.randn(x[:1].shape).expand_as(x)):
            return own(*args, **options)

    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_sample=shared)
    with fs.accelerate(diffusion), pytest.raises(ValueError, match=r"step 0 .*plus noise"):
        drawn(diffusion, Net(diffusion), **asked(copy))


def test_a_comparison_leaves_the_generators_of_other_devices_alone(copy: Copy) -> None:
    diffusion = made(copy, keep=EVERY_THIRD)
    with fs.accelerate(diffusion, window=6), mock.patch("torch.cuda.manual_seed_all") as seeded:
        diffusion.p_sample_loop(Net(diffusion), SHAPE, **asked(copy))
    assert not seeded.called


PLACES: list[tuple[Any, Any]] = [
    (lambda one: vars(one)["conf"].temperature, lambda one, value: setattr(one.conf, "temperature", value)),
    (lambda one: vars(one)["_temperature"], lambda one, value: setattr(one, "_temperature", value)),
    (lambda one: vars(one)["options"]["temperature"], lambda one, value: one.options.update(temperature=value)),
]


@pytest.mark.parametrize(("read", "write"), PLACES, ids=["object", "private", "dictionary"])
def test_a_value_that_changes_the_noise_is_noticed_wherever_it_is_kept(
    copy: Copy, read: Any, write: Any
) -> None:
    def heated(own: Any, *args: Any, **options: Any) -> Any:
        noise = torch.randn_like
        with mock.patch("torch.randn_like", lambda x: read(own.args[0]) * noise(x)):
            return own(*args, **options)

    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_sample=heated)
    diffusion.conf, diffusion.options = SimpleNamespace(), {}
    write(diffusion, 1.0)
    with fs.accelerate(diffusion, window=6):
        drawn(diffusion, Net(diffusion), **asked(copy))
        write(diffusion, 3.0)
        with pytest.raises(ValueError, match=r"step 0 .*plus noise"):
            drawn(diffusion, Net(diffusion), **asked(copy))


def noisier(own: Any, *args: Any, **options: Any) -> Any:
    found = own(*args, **options)
    return found | {"log_variance": found["log_variance"] + 0.01 * args[1]}


def test_a_variance_that_depends_on_the_state_is_refused(copy: Copy) -> None:
    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_mean_variance=noisier)
    sentence = "returns another variance than its model_var_type has"
    with fs.accelerate(diffusion), pytest.raises(ValueError, match=sentence):
        drawn(diffusion, Net(diffusion), **asked(copy))


@pytest.mark.parametrize("name", ["p_sample", "p_sample_loop_progressive", "p_sample_loop"])
def test_patches_are_refused(copy: Copy, name: str) -> None:
    diffusion = made(copy, keep=EVERY_THIRD)
    own = getattr(diffusion, name)
    sentence = rf"Diffusion\.{name} is not .*own function: it is overridden or patched"
    setattr(diffusion, name, lambda *args, **options: own(*args, **options))
    with pytest.raises(ValueError, match=sentence):
        fs.accelerate(diffusion)
    delattr(diffusion, name)
    if name == "p_sample":
        with fs.accelerate(diffusion):
            drawn(diffusion, Net(diffusion), **asked(copy))
            diffusion.p_sample = own.__func__.__get__(made(copy))
            with pytest.raises(ValueError, match=sentence):
                drawn(diffusion, Net(diffusion), **asked(copy))


def test_its_attributes_are_read_again_at_every_sample(copy: Copy) -> None:
    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy)
    net = Net(diffusion)
    with fs.accelerate(diffusion, window=6):
        before = drawn(diffusion, net, **given)
        evidence = diffusion.foresample_report.evidence
        assert (evidence.steps_replayed, len(evidence.trusted)) == (20, 1)
        assert torch.equal(drawn(diffusion, net, **given), before)
        assert diffusion.foresample_report.evidence.steps_replayed == 0
        drawn(diffusion, net, clip_denoised=False, **given)
        assert diffusion.foresample_report.evidence.steps_replayed == 20
        diffusion.model_var_type = copy.plain.ModelVarType.FIXED_LARGE
        assert not torch.equal(drawn(diffusion, net, **given), before)
        assert diffusion.foresample_report.evidence.steps_replayed == 20


def test_a_loop_that_reads_states_on_the_way_gets_an_error_that_says_to_iterate(copy: Copy) -> None:
    def averaged(own: Any, *args: Any, **options: Any) -> Tensor:
        steps = own.args[0].p_sample_loop_progressive(*args, **options)
        return sum(step["sample"] for step in steps)

    diffusion = subclass(made(copy, keep=EVERY_THIRD), p_sample_loop=averaged)
    with (
        fs.accelerate(diffusion),
        pytest.raises(ValueError, match=r"keeps its last state only.*iterate over p_sample_loop_progressive"),
    ):
        drawn(diffusion, Net(diffusion), **asked(copy))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("window", [5, "auto"])
def test_no_samples_are_no_samples(copy: Copy, guided: bool, window: Any) -> None:
    diffusion = made(copy)
    net = Guided(diffusion)
    model, given = (net.forward_with_cfg, {"cfg_scale": 2.0}) if guided else (net, {})
    options = {"device": "cpu", "model_kwargs": {"y": {"shift": torch.zeros(0, 1, 1)}} | given}
    try:
        diffusion.p_sample_loop(model, (0, 2, 2), **options)
    except IndexError:
        pytest.skip(f"{copy} fails without samples")
    with fs.accelerate(diffusion, window=window):
        assert diffusion.p_sample_loop(model, (0, 2, 2), **options).shape == (0, 2, 2)
        path = list(diffusion.p_sample_loop_progressive(model, (0, 2, 2), **options))
        assert len(path) == 60
        assert path[0]["pred_xstart"].shape == (0, 2, 2)


def test_noise_for_another_number_of_samples_is_refused(copy: Copy) -> None:
    diffusion = made(copy)
    with fs.accelerate(diffusion), pytest.raises(ValueError, match="noise holds 2 states and shape asks for 6"):
        diffusion.p_sample_loop(Net(diffusion), SHAPE, noise=torch.randn(2, 1, 2), **asked(copy))


def test_noise_says_the_shape_of_a_state(copy: Copy) -> None:
    """As in its own loop, which uses only the number of samples in `shape`."""
    diffusion = made(copy)
    with fs.accelerate(diffusion, window=5):
        samples = diffusion.p_sample_loop(Net(diffusion), SHAPE, noise=torch.randn(6, 1, 4), **asked(copy))
    assert samples.shape == (6, 1, 4)


# ------------------------------------------------------------------ refusals, and leaving no trace


def test_loops_that_are_no_chain_are_refused(copy: Copy) -> None:
    with pytest.raises(
        ValueError, match=r"model_var_type=LEARNED\) has a variance without.*LEARNED_RANGE or a fixed"
    ):
        fs.accelerate(made(copy, variance="LEARNED"))
    diffusion = made(copy, keep=EVERY_THIRD)
    fs.accelerate(diffusion)
    net = Net(diffusion)
    net.dropout = torch.nn.Dropout(0.1)
    for model in (net, net.forward):
        with pytest.raises(ValueError, match=r"has Dropout: call its eval\(\)"):
            drawn(diffusion, model, device="cpu", **asked(copy))
    net.eval()
    for name, value in (("const_noise", True), ("skip_timesteps", 5)):
        if copy.takes(name):
            with pytest.raises(ValueError, match=f"cannot take {name}"):
                drawn(diffusion, net, **asked(copy, **{name: value}))


@pytest.mark.parametrize(
    "copied", [copies_of.deepcopy, copies_of.copy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_restoring_leaves_no_trace_and_copies_are_plain(copy: Copy, copied: Any) -> None:
    diffusion, given = made(copy, keep=EVERY_THIRD), asked(copy)
    net, before = Net(diffusion), set(vars(diffusion))
    plain = drawn(diffusion, net, **given)
    with fs.accelerate(diffusion, window=6):
        assert not torch.equal(drawn(diffusion, net, **given), plain)
        twin = copied(diffusion)
    for one in (diffusion, twin):
        assert set(vars(one)) == before
        assert torch.equal(drawn(one, net, **given), plain)


def test_ddim_stays_its_own(copy: Copy) -> None:
    diffusion = made(copy, keep=EVERY_THIRD)
    if not hasattr(diffusion, "ddim_sample_loop"):
        pytest.skip(f"{copy} has no DDIM")
    net, given = Net(diffusion), asked(copy, noise=torch.randn(SHAPE))
    plain = diffusion.ddim_sample_loop(net, SHAPE, **given)
    with fs.accelerate(diffusion):
        assert torch.equal(diffusion.ddim_sample_loop(net, SHAPE, **given), plain)
