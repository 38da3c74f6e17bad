"""Bad input is refused with its remedy, before long work: the target counts the calls made until then."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import foresample as fs
from foresample.backends.own_chain import require_own_chain
from foresample.contracts import affine_chain
from foresample.targets import replicated


class Walk:
    """A small sound chain; each test breaks one thing of it."""

    def __init__(self, **broken):
        self.shape = torch.Size([3])
        self.std = torch.full((6,), 0.5)
        self.calls = 0
        self.output = lambda x, step, row: 0.9 * x
        vars(self).update(broken)

    def start(self, noise, row):
        return noise

    def predict(self, x, step, row):
        self.calls += 1
        return self.output(x, step, row)

    def mean(self, x, prediction, step):
        return prediction


speculative = partial(fs.sample, window=3)
both = pytest.mark.parametrize("sampler", [speculative, fs.sequential], ids=["sample", "sequential"])


def refuses(run, target, kind, remedy, calls=0):
    with pytest.raises(kind, match=remedy):
        run(target)
    assert target.calls == calls


@both
def test_the_unbroken_walk_is_accepted(sampler):
    # Else every refusal below could be for the wrong reason.
    target = Walk()
    assert sampler(target, 2).samples.shape == (2, 3)
    assert target.calls > 0


# --- settings ---


@pytest.mark.parametrize(
    ("name", "value"), [*product(["window", "block"], [0, -1, 2.0, "3", True]), ("window", None)]
)
def test_window_and_block_must_be_whole_numbers_of_at_least_one(name, value):
    settings = {"window": 3, name: value}
    remedy = f"{name} must be a whole number of at least 1.* not {value!r}"
    refuses(lambda target: fs.sample(target, 2, **settings), Walk(), ValueError, remedy)


@both
@pytest.mark.parametrize("count", [0, -3, 2.0, "2", True])
def test_count_must_be_a_whole_number_of_at_least_one(sampler, count):
    remedy = f"count must be a whole number of at least 1, not {count!r}"
    refuses(lambda target: sampler(target, count), Walk(), ValueError, remedy)


@both
def test_a_call_without_count_and_seeds_is_refused_with_both_remedies(sampler):
    refuses(sampler, Walk(), ValueError, r"count=64, or seeds=\[…\]")


@both
@pytest.mark.parametrize("count", [2, 4])
def test_seeds_must_be_as_many_as_the_samples(sampler, count):
    remedy = f"3 seeds for count={count} samples: give one seed per sample, or no count"
    refuses(lambda target: sampler(target, count, seeds=[1, 2, 3]), Walk(), ValueError, remedy)


@both
@pytest.mark.parametrize("seeds", [[], torch.tensor([], dtype=torch.int64)], ids=["list", "tensor"])
def test_no_seeds_at_all_are_refused(sampler, seeds):
    refuses(lambda target: sampler(target, seeds=seeds), Walk(), ValueError, "seeds is empty: give one")


@both
@pytest.mark.parametrize("choice", [{"count": 2, "seed": -1}, {"seeds": [4, -1]}], ids=["seed", "seeds"])
def test_a_negative_seed_is_refused(sampler, choice):
    remedy = r"a seed must be a whole number from 0 to 2\*\*63 - 1, not -1"
    refuses(lambda target: sampler(target, **choice), Walk(), ValueError, remedy)


@pytest.mark.parametrize("source", ["unknown", "Nearest", None])
def test_frozen_names_what_it_can_freeze(source):
    with pytest.raises(ValueError, match=f"one of head, parent, nearest, not {source!r}"):
        fs.Frozen(source)


# --- the target's contract ---


@both
@pytest.mark.parametrize("member", ["shape", "std", "start", "predict", "mean"])
def test_a_target_that_lacks_a_member_is_refused_by_its_name(sampler, member):
    class Partial:
        calls = 0

    for name in {"shape", "std", "start", "predict", "mean"} - {member}:
        setattr(Partial, name, getattr(Walk(), name))
    remedy = f"Partial is not a target: it lacks {member}; see docs/extending.md, or wrap a denoiser"
    refuses(lambda target: sampler(target, 2), Partial(), TypeError, remedy)


@both
@pytest.mark.parametrize(("member", "called"), [("predict", "x, step, row"), ("mean", "x, prediction, step")])
def test_a_method_with_too_few_arguments_is_refused_before_the_work(sampler, member, called):
    target = Walk()
    setattr(target, member, lambda x, step: x)
    expected = rf"target\.{member} is called as {member}\({called}\), but <lambda>\(x, step\) \(.*, line \d+\) does not"
    refuses(lambda t: sampler(t, 2), target, TypeError, expected)


@both
@pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(3, 3), lambda x: x])
def test_an_object_that_is_not_a_target_is_refused(sampler, thing):
    with pytest.raises(
        TypeError, match=r"is not a target: it lacks .*wrap a denoiser with foresample\.targets"
    ):
        sampler(thing, 2)


@both
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf])
def test_a_std_that_is_negative_or_not_finite_is_refused_at_its_step(sampler, value):
    target = Walk()
    target.std[4] = value
    refuses(lambda t: sampler(t, 2), target, ValueError, r"at step 4; a deterministic transition has std 0")


@both
@pytest.mark.parametrize(
    "std",
    [torch.tensor(0.5), torch.ones(6, 1), torch.ones(0), torch.ones(6, dtype=torch.int64), [0.5] * 6, 0.5],
    ids=["0-d", "2-d", "empty", "integers", "list", "number"],
)
def test_a_std_that_is_not_one_float_per_transition_is_refused(sampler, std):
    remedy = r"target\.std must be a float32 or float64 tensor of shape \[N\], one scale per transition"
    refuses(lambda target: sampler(target, 2), Walk(std=std), ValueError, remedy)


class Offering(Walk):
    """A walk that offers its chain, to the kernels."""

    def __init__(self, **broken):
        weight, half = torch.zeros(6), torch.full((6,), 0.5)
        self.chain = SimpleNamespace(
            affine=True, std=half, state_weight=weight, prediction_weight=weight + 1, previous_weight=None
        )
        super().__init__(**broken)


@both
@pytest.mark.parametrize(
    "broken",
    [
        {"mean": lambda x, prediction, step: prediction + 1e-3 * x},
        {"mean": lambda x, prediction, step: torch.where((step == 5).unsqueeze(1), x, prediction)},
        {"mean": lambda x, prediction, step: prediction.clamp(-30, 30)},
        {"std": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.4])},
    ],
    ids=["mean", "last mean", "clipped mean", "last std"],
)
def test_a_chain_that_is_not_the_target_s_own_is_refused(sampler, broken):
    sampler(Offering(), 2)
    assert affine_chain(Offering()) is not None
    remedy = r"Offering.chain has another .* than the target: give the target a chain that agrees.*or none"
    refuses(lambda target: sampler(target, 2), Offering(**broken), ValueError, remedy)


class Long:
    """A chain of a hundred steps with a mean of its own, which differs from the chain it offers at the given steps."""

    shape, calls = torch.Size([2]), 0

    def __init__(self, leaves, dtype=torch.float64):
        ones = torch.ones(100, dtype=dtype)
        self.std, self.leaves = 0.1 * ones, leaves
        self.chain = fs.chains.Chain(self.std, 0.5 * ones, 0.5 * ones)

    def start(self, noise, row):
        return noise

    def predict(self, x, step, row):
        self.calls += 1
        return 0.9 * x

    def mean(self, x, prediction, step):
        return self.leaves(0.5 * x + 0.5 * prediction, step.unsqueeze(1))


def leaves_at(k, mean, step):
    return mean + (step == k)


LEAVES = {
    **{f"step {k}": (k, partial(leaves_at, k)) for k in (0, 1, 44, 98, 99)},
    "late steps": (88, lambda mean, step: torch.where((step >= 88) & (step < 98), mean + 1, mean)),
    "large states at a step": (57, lambda mean, step: torch.where(step == 57, mean.clamp(-30, 30), mean)),
    "small states at a step": (58, lambda mean, step: torch.where((step == 58) & (mean.abs() < 1), 0.0, mean)),
    "NaN at a step": (59, lambda mean, step: torch.where(step == 59, torch.nan, mean)),
    "rounding is no reason": (None, lambda mean, step: mean * (1 + 1e-12)),
    "it does not leave": (None, lambda mean, step: mean),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(
    "run",
    [
        lambda target: fs.sample(target, 2, window=3),
        lambda target: fs.sequential(target, 2),
        lambda target: fs.tune(target, windows=[2]),
        lambda target: fs.check(target, window=3, samples=2),
        lambda target: fs.sample(replicated([target]), 2, window=3),
    ],
    ids=["sample", "sequential", "tune", "check", "replicated"],
)
def test_a_mean_that_leaves_its_chain_at_any_step_is_refused(run, name):
    """Kernels follow the chain and the plain round the mean: they would draw from two distributions."""
    step, leaves = LEAVES[name]
    if step is None:
        run(Long(leaves))
        return
    remedy = rf"chain has another mean at step {step} than the target.*or none \(chain = None\)"
    with pytest.raises(ValueError, match=remedy):
        run(Long(leaves))


def patched(target, **attributes):
    for name, value in attributes.items():
        object.__setattr__(target, name, value)
    return target


def test_only_a_chain_s_own_mean_is_trusted():
    """The chain's own mean is not compared: a thousand steps of large pictures would take a second."""
    grid = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)

    def make():
        return fs.targets.vp(lambda x, time, row: 0.1 * x, grid, (2,))

    def other(x, prediction, step, previous=None, extra=None):
        return x

    class Another(fs.chains.Chain):
        mean = staticmethod(other)

    fields = {name: value for name, value in vars(make().chain).items() if name != "mean"}
    wrong = {
        "the target's": patched(make(), mean=other),
        "the chain's": patched(make(), chain=patched(make().chain, mean=other)),
        "the chain class's": patched(make(), chain=Another(**fields)),
        "the wrapper's": patched(replicated([make()]), mean=other),
        "the wrapped target's": replicated([patched(make(), mean=other)]),
        "the wrapper's chain": patched(
            replicated([make()]), chain=fs.chains.vp_chain(grid, eta=0.5).to("cpu", torch.float32)
        ),
    }
    for target in wrong.values():
        with pytest.raises(ValueError, match=r"chain has another .* than the target"):
            fs.sample(target, 2, window=3)
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foresample.backends.own_chain._first_other_mean", lambda *given: tried.append(given))
        for target in (make(), replicated([make()])):
            fs.sample(target, 2, window=3)
        assert not tried
        fs.sample(Long(lambda mean, step: mean), 2, window=3)
        assert tried


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 8, 8), (3, 224, 224)])
def test_a_mean_is_compared_in_parts_that_bound_the_memory(shape):
    """Means are compared at every step, for states of any size."""
    target, steps, most = Long(lambda mean, step: mean, torch.float32), set(), 0
    target.shape = torch.Size(shape)

    def mean(x, prediction, step):
        nonlocal most
        steps.update(step.tolist())
        most = max(most, x.numel())
        return 0.5 * x + 0.5 * prediction

    vars(target)["mean"] = mean
    require_own_chain(target)
    assert steps == set(range(100))
    assert most <= max(2**17, target.shape.numel())


class Lent:
    """All of another target, but a mean of its own."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        return getattr(self.target, name)

    def mean(self, x, prediction, step):
        return self.target.mean(x, prediction, step) + 1


@pytest.mark.parametrize("wrapped", [lambda t: t, lambda t: replicated([t])], ids=["as it is", "replicated"])
def test_a_custom_mean_is_kept_beside_a_borrowed_chain(wrapped):
    target = wrapped(Lent(Offering()))
    assert affine_chain(target) is None
    for sampler in (speculative, fs.sequential):
        assert sampler(target, 200).samples.mean() > 3  # Σ 0.9ᵏ; 0 without


# --- what the target returns ---


@both
@pytest.mark.parametrize(
    ("start", "kind", "remedy"),
    [
        (lambda noise, row: noise.long(), TypeError, r"torch\.float32, .*not torch\.int64; cast inside"),
        (
            lambda noise, row: noise.double(),
            TypeError,
            r"torch\.float32, .*not torch\.float64; cast inside",
        ),
        (lambda noise, row: noise[:, :2], ValueError, r"shape \(2, 3\) .*not \(2, 2\)"),
        (lambda noise, row: noise[0], ValueError, r"shape \(2, 3\) .*not \(3,\)"),
        (lambda noise, row: noise.tolist(), TypeError, "a tensor, not list"),
    ],
    ids=["integers", "float64", "shape", "one state", "list"],
)
def test_a_wrong_start_is_refused_before_the_first_call(sampler, start, kind, remedy):
    remedy = r"target\.start\(noise, row\) must return " + remedy
    refuses(lambda target: sampler(target, 2), Walk(start=start), kind, remedy)


@both
def test_a_start_that_does_not_take_its_rows_is_refused_before_the_first_call(sampler):
    remedy = r"target\.start must take \(noise, row\)"
    refuses(lambda target: sampler(target, 2), Walk(start=lambda noise: noise), TypeError, remedy)


@both
@pytest.mark.parametrize(
    ("output", "kind", "remedy"),
    [
        (lambda x, step, row: x[:, :2], ValueError, r"shape \(2, 3\) .*not \(2, 2\)"),
        (lambda x, step, row: x[:1], ValueError, r"shape \(2, 3\) .*not \(1, 3\)"),
        (lambda x, step, row: x.unsqueeze(0), ValueError, r"shape \(2, 3\) .*not \(1, 2, 3\)"),
        (
            lambda x, step, row: x.double(),
            TypeError,
            r"torch\.float32, .*not torch\.float64; cast inside",
        ),
        (
            lambda x, step, row: x.half(),
            TypeError,
            r"torch\.float32, .*not torch\.float16; .*half-precision network is fine",
        ),
        (
            lambda x, step, row: x.long(),
            TypeError,
            r"torch\.float32, .*not torch\.int64; cast inside",
        ),
        (lambda x, step, row: (x,), TypeError, "a tensor, not tuple"),
        (lambda x, step, row: {"sample": x}, TypeError, "a tensor, not dict"),
        (lambda x, step, row: None, TypeError, "a tensor, not NoneType"),
    ],
    ids=["shape", "rows", "dimensions", "float64", "float16", "integers", "tuple", "dict", "None"],
)
def test_a_wrong_prediction_is_refused_at_the_first_call(sampler, output, kind, remedy):
    remedy = r"target\.predict\(x, step, row\) must return " + remedy
    refuses(lambda target: sampler(target, 2), Walk(output=output), kind, remedy, calls=1)


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_is_reported_with_its_step_and_sample(sampler, value):
    def output(x, step, row):
        x = 0.9 * x
        x[(step == 4) & (row == 1), 2] = value
        return x

    target = Walk(output=output)
    with pytest.raises(FloatingPointError, match=r"NaN or infinity at step 4 of sample 1; .*wider dtype"):
        sampler(target, 3)
    # At once when step 4 was first used: nothing was sampled from it. A look after calls 1, 2 and 4 may come on top.
    assert target.calls <= 5 + 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_or_infinity_is_reported_when_only_a_later_sample_has_it(value):
    # Rows of a call are packed: sample and step must come from the packed row, not from the window.
    def output(x, step, row):
        return torch.where((row == 5).unsqueeze(1) & (step == 2).unsqueeze(1), value, 0.9 * x)

    for window in (1, 2, 5):
        with pytest.raises(FloatingPointError, match="at step 2 of sample 5;"):
            fs.sample(Walk(output=output), 7, window=window)


def test_a_draft_model_must_follow_the_same_contract():
    draft = Walk(output=lambda x, step, row: x.double())
    with pytest.raises(TypeError, match="cast inside the target"):
        fs.sample(Walk(), 2, window=3, drafter=fs.DraftModel(draft))
    assert draft.calls == 1


# --- what only shows later, or in other arguments ---


@both
@pytest.mark.parametrize(
    ("mean", "kind", "remedy"),
    [
        (lambda x, prediction, step: prediction[:, :1], ValueError, "target.mean.* must return shape"),
        (lambda x, prediction, step: prediction.double(), TypeError, "target.mean.* must return torch.float32"),
    ],
    ids=["broadcastable shape", "wider dtype"],
)
def test_a_wrong_mean_is_refused_and_not_broadcast(sampler, mean, kind, remedy):
    target = Walk(mean=mean)
    with pytest.raises(kind, match=remedy):
        sampler(target, 2)
    assert target.calls <= 1


@both
def test_no_nan_sample_is_returned(sampler):
    def mean(x, prediction, step):
        return torch.where((step == 5).unsqueeze(1), torch.nan, prediction)

    with pytest.raises(FloatingPointError, match="the state at step 6 of sample 0 is NaN or infinite"):
        sampler(Walk(mean=mean), 2)


@both
def test_a_state_that_broke_before_the_network_is_reported_as_a_state(sampler):
    def mean(x, prediction, step):
        return torch.where((step == 2).unsqueeze(1), torch.inf, prediction)

    with pytest.raises(FloatingPointError, match="the state at step 3 of sample 0 is NaN or infinite"):
        sampler(Walk(mean=mean), 1)


@both
@pytest.mark.parametrize("seeds", [[1.5, 2.0], [True], ["12"]], ids=str)
def test_seeds_are_not_rounded_into_whole_numbers(sampler, seeds):
    refuses(lambda target: sampler(target, seeds=seeds), Walk(), ValueError, "a seed must be a whole number")


def test_whole_numbers_of_any_type_are_accepted():
    np = pytest.importorskip("numpy")
    run = fs.sample(Walk(), np.int64(2), window=np.int32(3), seeds=torch.tensor([4, 5]))
    assert torch.equal(run.samples, fs.sample(Walk(), 2, window=3, seeds=[4, 5]).samples)


@pytest.mark.parametrize("drafter", ["replay", fs.Replay, 7], ids=["name", "class", "number"])
def test_an_object_that_is_not_a_drafter_is_refused(drafter):
    run = partial(fs.sample, count=2, window=3, drafter=drafter)
    refuses(lambda target: run(target), Walk(), TypeError, "is not a drafter; pass an object such as")


@both
def test_a_scalar_state_is_refused(sampler):
    remedy = r"a scalar state has torch.Size\(\[1\]\)"
    refuses(lambda target: sampler(target, 2), Walk(shape=torch.Size([])), ValueError, remedy)


@both
def test_a_network_that_writes_into_its_input_does_no_harm(sampler):
    honest = sampler(Walk(mean=lambda x, p, s: 0.5 * x + p), 3, seed=1).samples
    writing = Walk(mean=lambda x, p, s: 0.5 * x + p, output=lambda x, step, row: x.mul_(0.9).clone())
    assert torch.equal(sampler(writing, 3, seed=1).samples, honest)


def test_arguments_of_denoising_targets_must_fit():
    def zero(x, time, row):
        return torch.zeros_like(x)

    levels = [0.1, 0.5, 0.9]
    with pytest.raises(ValueError, match="time has 2 values for 3 steps"):
        fs.targets.vp(zero, levels, (2,), time=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="clip must be positive"):
        fs.targets.vp(zero, levels, (2,), clip=-1)
    with pytest.raises(ValueError, match="eps does not determine x0 at pure noise"):
        fs.targets.flow(zero, [1.0, 0.5], (2,), churn=0.1, reuse="eps")


# --- arguments that a target may not write into ---


@both
@pytest.mark.parametrize("name", ["x", "prediction", "step", "previous"])
def test_a_mean_that_writes_into_its_arguments_is_refused(sampler, name):
    def mean(x, prediction, step, previous):
        {"x": x, "prediction": prediction, "step": step, "previous": previous}[name].mul_(1)
        return prediction

    with pytest.raises(ValueError, match=f"target.mean writes into {name}.*work on a copy"):
        sampler(Walk(multistep=1, mean=mean), 2)


def test_a_mean_may_return_the_same_memory_every_time():
    class Reuses(Walk):
        def mean(self, x, prediction, step):
            memory = vars(self).setdefault(f"memory {len(x)}", torch.empty_like(x))
            return memory.copy_(prediction)

    for window in (1, 3):
        ours, plain = (fs.sample(target, 50, window=window, seed=1) for target in (Reuses(), Walk()))
        torch.testing.assert_close(ours.samples, plain.samples)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_chain_in_half_precision_is_refused(sampler, dtype):
    refuses(
        lambda t: sampler(t, 2), Walk(std=torch.full((6,), 0.5, dtype=dtype)), ValueError, "float32 or float64"
    )


@both
@pytest.mark.parametrize("shape", [(3,), [3]], ids=str)
def test_a_shape_that_is_not_torch_s_own_is_refused(sampler, shape):
    refuses(
        lambda t: sampler(t, 2), Walk(shape=shape), ValueError, "must be a torch.Size of one dimension or more"
    )


@both
@pytest.mark.parametrize("length", [1, 5, 7])
def test_a_chain_of_another_length_is_refused(sampler, length):
    own = SimpleNamespace(affine=True, std=torch.full((6,), 0.5), previous_weight=None)
    own.state_weight, own.prediction_weight = torch.zeros(6), torch.ones(length)
    refuses(
        lambda t: sampler(t, 2),
        Walk(chain=own),
        ValueError,
        rf"prediction_weight has shape \[{length}\]",
    )
