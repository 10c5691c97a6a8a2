"""Certificates alone decide: grow where a gain is certain and transfers, stop where none is left."""

from growth_service.core.decisions import CandidateReading, Decision, Grow, Reading, Stop, TrainOn
from growth_service.core.policies import SignalGuided
from growth_service.core.steps import AddBlock, AddData, AddUnits, Axis


def decide_certified(reading: Reading, policy: SignalGuided) -> Decision:
    """The decision table: saturated, not transferable, useful, undetermined - in this order.

    Source: the table of what depth, width and data could each buy, from the test-risk
    decomposition of Cheng et al. 2026: a gain on training that does not transfer calls for data.
    """
    tol = reading.tolerance_nats
    found = _in_order(reading)
    if not found:
        return TrainOn(reason="no site was probed")
    more_data = data_step(reading, axes=policy.axes, factor=policy.data_factor)
    settled = settled_by_certificates(reading, more_data)
    if settled is not None:
        return settled
    useful = [c for c in found if c.verdict == "useful"]
    if useful:
        return _grow_useful(useful, policy, more_data, tolerance=tol)
    reason = (
        f"undetermined: no candidate is certain above the tolerance of {tol:.3g} nats (largest lower limit "
        f"{max(c.gain_lower for c in found):.3g}), nor all below it (largest upper limit "
        f"{max(c.gain_upper for c in found):.3g})"
    )
    return TrainOn(reason=reason)


def settled_by_certificates(reading: Reading, more_data: AddData | None) -> Decision | None:
    """What certificates settle whatever training on would bring: nothing helps any more, or only data does."""
    tol, found = reading.tolerance_nats, _in_order(reading)
    if not found:
        return None
    open_ = [c for c in found if c.verdict != "saturated"]
    if not open_:
        highest = max(found, key=lambda c: c.gain_upper)
        reason = (
            f"saturated: at all {len(found)} candidates the predicted gain is below the tolerance of "
            f"{tol:.3g} nats (largest upper limit {highest.gain_upper:.3g} at {highest.path})"
        )
        return Stop(cause="saturated", reason=reason)
    if all(c.transfer_upper < tol for c in open_):
        leading = max(open_, key=lambda c: c.transfer_upper)
        finding = (
            f"at all {len(found)} candidates what training would learn moves the held-out loss by less than "
            f"the tolerance of {tol:.3g} nats (largest upper limit {leading.transfer_upper:.3g} at {leading.path})"
        )
        if more_data is not None:
            return Grow(changes=(more_data,), reason=f"{finding}: more of this data is left, add it")
        return Stop(cause="no_transferable_gain", reason=f"no transferable gain: {finding}")
    return None


def _in_order(reading: Reading) -> list[CandidateReading]:
    """Ties do not depend on the order of looking."""
    return sorted(reading.candidates, key=lambda c: (c.path, c.kind))


def _grow_useful(
    useful: list[CandidateReading], policy: SignalGuided, more_data: AddData | None, *, tolerance: float
) -> Decision:
    """Some candidate is certainly useful: data where training could not realise it, else the best per FLOP."""
    transferable = [c for c in useful if c.transfer_gain > 0]
    best = max(transferable or useful, key=lambda c: c.transfer_gain / max(c.added_flops, 1))
    finding = (
        f"useful at {best.path}: predicted gain at least {best.gain_lower:.3g} nats > tolerance {tolerance:.3g}, "
        f"transferable {best.transfer_gain:.3g}, best per FLOP of {len(useful)} useful candidates"
    )
    if more_data is not None and best.realisable < 0.5:
        reason = f"{finding}, but only {best.realisable:.0%} is realisable with this many samples: add data"
        return Grow(changes=(more_data,), reason=reason)
    allowed = [c for c in transferable if c.kind in policy.axes]
    if not allowed:
        why = "training would not move towards it" if not transferable else f"only {', '.join(policy.axes)} may grow"
        return TrainOn(reason=f"{finding}, but {why}")
    chosen = max(allowed, key=lambda c: c.transfer_gain / max(c.added_flops, 1))
    if chosen is not best:
        finding = (
            f"useful at {chosen.path}: predicted gain at least {chosen.gain_lower:.3g} nats > tolerance "
            f"{tolerance:.3g}, transferable {chosen.transfer_gain:.3g}, best per FLOP on the axes that may grow"
        )
    if chosen.kind == "depth":
        return Grow(
            changes=(AddBlock(site=chosen.path, inner=policy.inner, jumpboard=policy.jumpboard),), reason=finding
        )
    return Grow(changes=(AddUnits(block=chosen.path, units=policy.units),), reason=finding)


def data_step(reading: Reading, *, axes: tuple[Axis, ...], factor: float) -> AddData | None:
    """The next larger training subset, or None where all data is in use or data may not grow."""
    if "data" not in axes or reading.data_share >= 1.0:
        return None
    return AddData(share=min(1.0, reading.data_share * factor))
