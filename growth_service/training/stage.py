"""One stage of a live trial: take the step decided before, train, fall back, evaluate, look.

Everything is paid for from the trial's account as it happens; what the last evaluation on test will cost stays set
aside.
"""

import functools
import math
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growth_service.core.decisions import Anneal, Grow, StopCause
from growth_service.core.ledger import Ledger
from growth_service.core.rates import Window
from growth_service.core.records import StageRecord
from growth_service.core.schedule import GrowthSchedule
from growth_service.errors import NotFiniteError, UserError
from growth_service.models.sites import size_of
from growth_service.probing import SaturationReport
from growth_service.probing.probe import Estimate
from growth_service.training.augment import augmented
from growth_service.training.batches import DataPosition, next_indices, shards_of
from growth_service.training.evaluate import Evaluation, evaluate, loss_sum
from growth_service.training.gradients import ShardedGradients
from growth_service.training.growing import StepTaken, take_step
from growth_service.training.looking import look, look_estimate, look_is_due
from growth_service.training.optimizer import DECAY_SHARE, fresh_parameters, set_learning_rate, stage_rates
from growth_service.training.ranks import weights_digest
from growth_service.training.state import TrialState
from growth_service.training.under_way import EVERY_STEPS, Kept, UnderWay, keep

HEARTBEAT_S = 2.0
EVALUATE_SAMPLES = 4096
"""Most training samples of an evaluation, where a job says nothing else."""
STEADY_SLACK = 1.1
"""A stage that ends at its full rate is undone where its training loss rose by more than this factor: such losses
jitter, and only one that was trained to its end can be held to where it began."""


class StageEndError(Exception):
    """A stage cannot be finished: its loss is not finite, or the budget is too small for it."""

    def __init__(self, cause: StopCause, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


class Extent(NamedTuple):
    """How far a stage goes."""

    window: Window
    """Part of the budget that it covers, which its learning rate follows."""
    until: int
    """FLOPs that the trial will have spent at its end."""
    last: bool
    """Whether nothing comes after it."""

    @property
    def annealed(self) -> bool:
        """Whether a steady rate has decayed at its end."""
        return self.window.end >= 1


def extent_of(state: TrialState, schedule: GrowthSchedule) -> Extent:
    """How far the coming stage of a trial goes: as the schedule says, or one decay where the trial ends early."""
    ends = (0.0, *schedule.stage_ends())
    if isinstance(state.decision, Anneal):
        steady = 1 - state.config.training.get("decay_share", DECAY_SHARE)
        start = max(steady, ends[state.stage], 1e-9)  # from where the rate stands, where it has begun to decay
        until = min(state.budget.total_flops, round(state.budget.spent_flops / start))
        return Extent(window=Window(start, 1.0), until=until, last=True)
    number = min(state.stage, schedule.num_stages - 1)  # a trial that was trained to its end has no further stage
    window = Window(start=ends[number], end=ends[number + 1])
    return Extent(
        window=window,
        until=round(window.end * state.budget.total_flops),
        last=state.stage + 1 >= schedule.num_stages,
    )


class _Losses(NamedTuple):
    """Old network and jumpboard on the training subset in force and on validation."""

    old_train: float
    old_val: float
    jumpboard_train: float
    jumpboard_val: float


class Stage:
    """The coming stage of a trial: what it does and what it has cost so far."""

    def __init__(self, state: TrialState, schedule: GrowthSchedule, *, gradients: ShardedGradients) -> None:
        self.state, self.schedule, self.gradients = state, schedule, gradients
        self.config, self.ranks = state.config, state.ranks
        self.extent = extent_of(state, schedule)
        self.number = state.stage
        self.spent = 0
        self.blind = False
        """True where the budget did not pay for the look that was due."""
        self._started = time.perf_counter()
        self._taken = StepTaken()
        self._losses: _Losses | None = None
        self._floor: float | None = None
        """Loss on the training subset that the stage must not end above."""
        self._trained_s = self._grown_s = 0.0
        self._fallback = False
        self._look_flops = 0
        """What the look after the stage will cost at most."""

    @functools.cached_property
    def look_due(self) -> bool:
        """Whether a look after the stage could change what comes next, as seen before the stage."""
        return look_is_due(self.state, self.schedule, last=self.extent.last, until=self.extent.until)

    def run(self, *, key: str, kept: Kept | None = None) -> StageRecord:
        """Step, train, fall back, evaluate, probe; what comes next is left open.

        Args:
            key: Address of the stage.
            kept: The stage as it was kept; the state stands there.
        """
        state = self.state
        if kept is None:
            self._begin()
            before = state.snapshot() if self._floor is not None else {}
            far = self._at_the_start(key)
        else:
            far, before = kept.far, kept.before
            self._resume(far)
        self._train(far)
        on_train = self._evaluate("train")
        if self._floor is not None and not on_train.loss <= self._floor * self._slack():
            self._fallback = True
            state.fall_back(before)
            on_train = on_train._replace(loss=self._floor)
        on_val = self._evaluate("val")
        if not (math.isfinite(on_train.loss) and math.isfinite(on_val.loss)):
            raise StageEndError("diverged", f"the loss after stage {self.number} is not finite")
        report = self._look()
        state.spend(self.spent)
        digest = weights_digest(state.model)
        self.ranks.agree(digest, what=f"after stage {self.number}")
        return self._record(on_train, on_val, report, digest=digest)

    def _at_the_start(self, key: str) -> UnderWay:
        return UnderWay(
            key=key,
            step=0,
            num_batches=self.planned_batches(already=self.spent, look_flops=self._look_flops),
            spent=self.spent,
            taken=self._taken,
            losses=self._losses,
            floor=self._floor,
            look_flops=self._look_flops,
            grown_s=self._grown_s,
        )

    def _resume(self, far: UnderWay) -> None:
        """Go on where the stage was kept."""
        self._taken, self._floor, self._look_flops = far.taken, far.floor, far.look_flops
        self._losses = None if far.losses is None else _Losses(*far.losses)
        self.spent, self._grown_s = far.spent, far.grown_s
        self._started -= far.seconds
        self.state.not_lost(far.spent)

    def _slack(self) -> float:
        """Factor by which the training loss may rise."""
        restarts = self.config.training.get("rates", "restarts") == "restarts"
        return 1.0 if restarts or self.extent.annealed else STEADY_SLACK

    def _begin(self) -> None:
        """Execute the last decision and measure where the stage starts from."""
        state = self.state
        old = state.last
        if isinstance(state.decision, Grow):
            started = time.perf_counter()
            self._taken = self._grow(state.decision)
            self._grown_s = time.perf_counter() - started
        if old is not None and self._taken.words:
            self._losses = self._jumpboard_losses(old)
            self._floor = self._losses.jumpboard_train
            state.save(f"{self.number:03d}-jumpboard", jumpboard=True)
        elif old is not None:
            self._floor = old.loss_train
        estimate = self._estimate()
        self._look_flops = estimate.flops
        state.flops_probe += estimate.cost
        self._pay(estimate.cost)

    def _grow(self, decision: Grow) -> StepTaken:
        state = self.state
        taken = take_step(
            state.model,
            decision.changes,
            decided_after=self.number - 1,
            seed=self.config.seed,
            optimizer=state.optimizer,
            train=state.splits.train,
            subset=state.subset,
            ridge=self.config.probe["ridge"],
            fold_limit=self.config.probe["train_samples"],
            ranks=self.ranks,
        )
        if taken.data_share is not None:
            state.data_share, state.position = taken.data_share, DataPosition(epoch=state.position.epoch + 1)
        # Before the wrapper is renewed: that copies rank 0's weights to all and would hide a difference.
        self.ranks.agree(weights_digest(state.model), what=f"after growing for stage {self.number}")
        if taken.receipts:
            self.gradients.rewrap()
            state.count_cost()
        state.flops_probe += taken.flops
        self._pay(taken.flops)
        return taken

    def _jumpboard_losses(self, old: StageRecord) -> _Losses:
        """Losses of the old network and the jumpboard on the subset now in force and on validation.

        Without a jumpboard step the jumpboard is the old network; its losses are known, but for
        the training loss where the subset changed.
        """
        taken = self._taken
        if not taken.moved:
            old_train = self._evaluate("train").loss if taken.data_share is not None else old.loss_train
            return _Losses(old_train, old.loss_val, old_train, old.loss_val)
        assert taken.data_share is None, "a jumpboard step and a data step are separate decisions"
        moved_train, moved_val = self._evaluate("train").loss, self._evaluate("val").loss
        return _Losses(old.loss_train, old.loss_val, moved_train, moved_val)

    # -- training --------------------------------------------------------------------------------

    def _pay(self, flops: int) -> None:
        """Book FLOPs on the stage; what the last evaluation on test will cost stays set aside."""
        self.spent += flops
        if self.spent > self.room():
            reason = f"stage {self.number} would cost more than the {self.room():.3g} FLOPs that are left"
            raise StageEndError("budget", reason)

    def room(self) -> int:
        """FLOPs that are free for the present stage."""
        state = self.state
        at_the_end: int = state.cost.forward * len(state.splits.test.targets)
        return max(0, state.budget.free_flops - at_the_end)

    def planned_batches(self, *, already: int = 0, look_flops: int | None = None) -> int:
        """Global batches of the coming stage: what is left of the budget's share up to its end pays for.

        One at least, as long as the rest of the budget pays for it.

        Args:
            already: FLOPs that the stage has cost so far (its grow step).
            look_flops: What its look will cost at most; None: find out.
        """
        state = self.state
        look_flops = self._estimate().flops if look_flops is None else look_flops
        evaluations: int = state.cost.forward * (self._evaluated("train") + self._evaluated("val"))
        room, others = self.room(), already + evaluations + look_flops
        share = min(room, self.extent.until - state.budget.spent_flops)
        per_batch: int = self.config.training["batch_size"] * state.cost.train
        at_least = 1 if room - others >= per_batch else 0
        return max(at_least, (share - others) // per_batch)

    def _estimate(self) -> Estimate:
        return look_estimate(self.state, self.schedule, due=self.look_due, until=self.extent.until)

    def _train(self, far: UnderWay) -> None:
        """Train for as many global batches as the stage pays for, from where it is."""
        state, settings, num_batches = self.state, self.config.training, far.num_batches
        self._check_trainable(num_batches)
        last_beat = kept = time.perf_counter()
        started = kept - far.trained_s
        per_batch: int = settings["batch_size"] * state.cost.train
        state.model.train()
        with fresh_parameters(state.optimizer, self._new_parameters()):
            for step in range(far.step, num_batches):
                if self._keeps_now(step, kept):
                    kept = time.perf_counter()
                    keep(state, self._far(far, step=step, trained_s=kept - started))
                self._set_rates(step / num_batches)
                indices, state.position = next_indices(
                    state.position, subset=state.subset, batch_size=settings["batch_size"], seed=self.config.seed
                )
                shards = shards_of(state.splits.train, indices, num_shards=settings["shards"])
                kind = settings.get("augment", "none")
                shards = augmented(shards, kind, seed=self.config.seed, position=state.position)
                self.gradients.backward(shards, loss_sum)
                self._pay(per_batch)
                if not _has_finite_gradient(state.model):
                    reason = f"a gradient was not finite in step {step} of stage {self.number}"
                    raise StageEndError("diverged", reason)
                state.optimizer.step()
                state.targets_seen += settings["batch_size"] * state.targets_per_sample
                if time.perf_counter() - last_beat > HEARTBEAT_S:
                    last_beat = time.perf_counter()
                    state.beat(self.spent)
        self._trained_s = time.perf_counter() - started

    def _set_rates(self, share: float) -> None:
        """Learning rates after this share of the stage."""
        first, window, scale = self.number == 0, self.extent.window, self.state.rate_scale
        set_learning_rate(
            self.state.optimizer, stage_rates(share, self.config.training, first=first, window=window, scale=scale)
        )

    def _keeps_now(self, step: int, kept: float) -> bool:
        """Whether the stage is to be kept now: rank 0 looks at the clock, now and then."""
        if step % EVERY_STEPS:
            return False
        return bool(self.ranks.broadcast(time.perf_counter() - kept > self.config.checkpoint_s))

    def _far(self, begun: UnderWay, *, step: int, trained_s: float) -> UnderWay:
        seconds = time.perf_counter() - self._started
        return replace(begun, step=step, spent=self.spent, trained_s=trained_s, seconds=seconds)

    def _new_parameters(self) -> list[nn.Parameter]:
        """What the stage's own grow steps added, where that is to warm up by itself."""
        if self.config.training.get("rewarm", "whole") != "new":
            return []
        names = {n for r in self._taken.receipts if r.kind in ("insert", "widen", "stream") for n in r.parameters}
        return [p for n, p in self.state.model.named_parameters() if n in names]

    def _check_trainable(self, num_batches: int) -> None:
        if num_batches == 0 and self.number == 0:
            raise UserError(
                f"the budget of trial {self.config.trial} ({self.config.budget_flops:.3g} FLOPs) does not pay for one "
                f"batch in the first of its {self.schedule.num_stages} stages: raise budget.trial or use fewer stages"
            )
        if num_batches == 0:
            raise StageEndError("budget", f"what is left does not pay for one batch in stage {self.number}")
        batch_size, subset = self.config.training["batch_size"], self.state.subset
        if batch_size > subset:
            raise UserError(
                f"training.batch_size {batch_size} is larger than the {subset} training samples in force: use a "
                f"smaller batch or a data_share above {self.state.data_share:g}"
            )

    def _evaluate(self, part: str) -> Evaluation:
        """Evaluate on the training subset in force or on another whole split, and pay for it."""
        state = self.state
        limit = self._evaluated(part)
        self._pay(state.cost.forward * limit)
        return evaluate(state.model, getattr(state.splits, part), ranks=self.ranks, limit=limit)

    def _evaluated(self, part: str) -> int:
        """Samples of a split on which a loss is measured: the first of the training subset, all of another."""
        if part == "train":
            limit: int = self.config.training.get("evaluate_samples", EVALUATE_SAMPLES)
            return min(self.state.subset, limit)
        return len(getattr(self.state.splits, part).targets)

    def _look(self) -> SaturationReport | None:
        """Probe, where the policy looks and the budget pays for it."""
        state = self.state
        if self._look_flops == 0:
            return None
        if self._look_flops > self.room() - self.spent:
            self.blind = True
            return None
        try:
            report = look(state, self.schedule, due=self.look_due)
        except NotFiniteError as error:
            raise StageEndError("diverged", str(error)) from None
        if report is not None:
            state.flops_probe += report.flops
            self._pay(report.flops)
        return report

    # -- recording -------------------------------------------------------------------------------

    def _record(
        self, on_train: Evaluation, on_val: Evaluation, report: SaturationReport | None, *, digest: str
    ) -> StageRecord:
        state, taken = self.state, self._taken
        depth, width, params = size_of(state.model)
        seconds = time.perf_counter() - self._started
        signal: dict[str, Any] = {}
        if report is not None:
            signal = {
                "verdict": report.verdict,
                "tolerance_nats": report.tolerance_nats,
                "certificates": [s.to_dict() for s in report.sites],
                "protocol": report.protocol,
            }
        return StageRecord(
            trial=self.config.trial,
            stage=self.number,
            depth=depth,
            width=width,
            params=params,
            train_samples=state.subset,
            data_share=state.data_share,
            loss_train=on_train.loss,
            loss_val=on_val.loss,
            accuracy_val=on_val.accuracy,
            flops_total=state.budget.spent_flops,
            flops_probe=state.flops_probe,
            targets_seen=state.targets_seen,
            flops_per_sample=state.cost.train,
            budget=state.budget.to_dict(),
            decision={},
            receipts=[r.to_dict() for r in taken.receipts],
            step=taken.words,
            fallback=self._fallback,
            ledger=self._ledger(on_train, on_val),
            digest=digest,
            stage_s=seconds,
            overhead_s=seconds - self._trained_s,
            grow_s=self._grown_s,
            flops_wasted=state.flops_wasted,
            attempt=state.attempt,
            **signal,
        )

    def _ledger(self, on_train: Evaluation, on_val: Evaluation) -> dict[str, Any] | None:
        """The account of the stage's grow step; None where nothing grew."""
        if self._losses is None:
            return None
        return Ledger(
            step=", ".join(self._taken.words),
            **self._losses._asdict(),
            new_train=on_train.loss,
            new_val=on_val.loss,
            fallback=self._fallback,
        ).to_dict()


def _has_finite_gradient(model: nn.Module) -> bool:
    """False once a loss was not finite: that reaches every gradient, so the last one tells."""
    last: Tensor | None = None
    for parameter in model.parameters():
        last = parameter.grad if parameter.grad is not None else last
    return last is None or bool(torch.isfinite(last).all())
