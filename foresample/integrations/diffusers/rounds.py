"""The speculative sampler behind a pipeline's loop: drafting, and verification with the loop's outputs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from foresample.backends import backend_of, normal
from foresample.chains import Chain
from foresample.contracts import drafter_for, no_history
from foresample.core.report import Commit, Report, Tally
from foresample.core.round import Call, Packed, Speculation, begin, last_draftable
from foresample.engine.slots import HandedRounds
from foresample.integrations.refusal import REMEDY, Refused
from foresample.settings import Settings
from foresample.targets import ChainTarget


class Rounds:
    """Drafts states of all images, and settles their rounds by the guided outputs that the loop hands back."""

    def __init__(
        self, chain: Chain, x: Tensor, settings: Settings, seed: Tensor, observe: Callable[[Commit], None]
    ) -> None:
        """`x`: the first latents, [images, *shape]; `seed`: one for each image."""
        self.chain, self.x, self.seed = chain, x.float(), seed
        target = ChainTarget(chain, x.shape[1:], _unreachable)
        drafter, window = drafter_for(settings.drafter, target), settings.window
        assert isinstance(window, int)
        backend = backend_of(target)
        last = last_draftable(chain.std)
        last[0] = 0  # the loop's first turn evaluates one state of each image, whatever the drafter
        plan = Speculation(drafter, window, settings.block, settings.recycle, last, Packed(), backend.normal)
        self.report = Report(f"{drafter}", len(chain.std), len(x), window, slots=len(x))
        self._tally, self._started = Tally(window, len(chain.std), x.device, backend.count), perf_counter()
        rows = begin(target, plan, seed, x=self.x)
        self._rounds = HandedRounds(target, rows, plan, self._tally, observe)
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}  # each image's last state and prediction

    @property
    def call(self) -> Call | None:
        """The states to evaluate next; None when all images are finished."""
        return self._rounds.call

    @property
    def done(self) -> bool:
        return self._rounds.finished is not None

    def settle(self, x: Tensor, output: Tensor, known: Tensor | None = None) -> None:
        """Settle the round under way, given the guided output at x: the states as the loop had them.

        `known`, [images, *shape]: coordinates that the loop overwrites. They have no part in the distribution, so they
        are drafted without error. A mean that limits the prediction needs them: a threshold depends on all coordinates.
        """
        call = self.call
        assert call is not None
        prediction = self.chain.predict(x, output, call.step, call.extra)
        if known is not None:
            for i in (call.step == len(self.chain.std) - 1).nonzero().flatten().tolist():
                self._ends[int(call.row[i])] = x[i], prediction[i]
            if self.chain.unlimited_weight is None:
                prediction = torch.where(known[call.row], 0.0, prediction)
        self._rounds.answer(prediction)

    def finish(self, own_seconds: float, straddled: int) -> None:
        """Complete the report; `own_seconds` were not the pipeline's, `straddled` turns took two network calls."""
        done, report = self._rounds.finished, self.report
        assert done is not None
        report.seconds = perf_counter() - self._started
        report.target_seconds = report.seconds - own_seconds
        self._tally.close(report, done.x, done.calls, done.evaluations)
        report.calls_mean += straddled
        report.speedup = report.steps / report.calls_mean

    def images(self, known: Tensor | None) -> Tensor:
        """The finished images; where the loop overwrites, the last transition as the pipeline takes it."""
        assert self._rounds.finished is not None
        x = self._rounds.finished.x
        if known is None:
            return x
        chain, last = self.chain, torch.full((1,), len(self.chain.std) - 1, device=x.device)
        if any(w is not None and w[-1] != 0 for w in (chain.previous_weight, chain.older_weight)):
            raise Refused(
                f"the scheduler's last step uses earlier predictions, which a known region does not allow; {REMEDY}"
            )
        x = x.clone()
        for image, (state, prediction) in self._ends.items():
            mean, seed = chain.mean(state[None], prediction[None], last), self.seed[image : image + 1]
            unit = normal(seed, x.shape[1:], x.dtype, step=last, draw=last + 2**31)
            x[image] = torch.where(known[image], (mean + chain.std[-1] * unit)[0], x[image])
        return x

    def shift(self, one: Tensor, two: Tensor) -> tuple[int, float | None]:
        """The distance of the means of the first step with noise for two network outputs, in std."""
        x, noisy = self.x[:1], (self.chain.std > 0).nonzero().flatten()
        if not len(noisy) or one.numel() != x.numel():  # no noise, or an output that is not of latents
            return 0, None
        k, before = noisy[:1], no_history(self.chain, x)
        outputs = [output.view_as(x).float() for output in (one, two)]
        means = [self.chain.mean(x, self.chain.predict(x, o, k), k, before) for o in outputs]
        return int(k), float((means[0] - means[1]).norm() / self.chain.std[k])


class Unevaluated:
    """Stands for `Rounds` in a rehearsal of the loop: nothing is drafted, and the images are made up."""

    call: Call | None = None
    done = True

    def __init__(self, x: Tensor) -> None:
        self.x, self.report = x, Report("rehearsal", 0, len(x), 0)

    def settle(self, x: Tensor, output: Tensor, known: Tensor | None = None) -> None:
        """Nothing to settle."""

    def finish(self, own_seconds: float, straddled: int) -> None:
        """Nothing to report."""

    def shift(self, one: Tensor, two: Tensor) -> tuple[int, float | None]:
        return 0, None

    def images(self, known: Tensor | None) -> Tensor:
        noise = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(len(self.x))).to(self.x)
        return self.x.std() * noise


def _unreachable(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    raise AssertionError("the pipeline evaluates the network, not the target")
