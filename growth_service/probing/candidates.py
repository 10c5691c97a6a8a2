"""Candidates: blocks that could be added somewhere, held beside the network, never in it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.blocks.projections import Projection, projection_shape, shares_features
from growth_service.errors import GrowthError, SiteError, UserError
from growth_service.models.sites import resolve, stream_of, with_stream

Loss = Callable[[Any, Any], Tensor]
Reduction = Literal["mean", "sum", "none"]
Batch = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A block with a zero projection, and the module whose output it would add to."""

    path: str
    """Site of a new block (depth), or the block that would get new units (width)."""
    block: Any
    """A :class:`Block`; or any module that adds nothing yet, scored through Jacobian products."""
    kind: Literal["depth", "width", "stream"] = "depth"
    """A new block reads the output of the module, new units read its input; both add to the output. New channels of the
    stream (of a widened copy) are the last of the module's output, written from what its last layer reads."""
    beside: tuple[str, ...] = ()
    """Paths of existing linear maps or convolutions that write at the same place: what their inputs express
    already is taken off the score (formula "grow against train on")."""
    shared: str | None = None
    """Path of an existing block with the same inner weights that reads the same stream: its features are those
    of the candidate, so they are taken from the network's own forward pass. None: they are computed."""
    name: str = ""
    """Tells several candidates at one site apart, for example where their inner weights come from."""
    reads: str | None = None
    """Path of the module whose input new units read in place of that of ``path``: units of a sequential transformer
    block read the stream and attention. None: the input of ``path``."""
    added_flops: int | None = None
    """FLOPs that it would add to a training sample; None: those of the block, counted."""


@contextmanager
def untouched(model: nn.Module, *, with_gradient: bool) -> Iterator[None]:
    """Eval mode and frozen parameters inside; everything as it was afterwards, whatever happens.

    Freezing lets autograd skip all weight gradients: only stream gradients are computed.
    """
    modes = [(m, m.training) for m in model.modules()]
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    devices = list({p.device for p, _ in frozen if p.device.type == "cuda"})
    model.eval()
    try:
        for p, _ in frozen:
            p.requires_grad_(False)
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(with_gradient):
            yield
    finally:
        for p, flag in frozen:
            p.requires_grad_(flag)
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(blocks: list[nn.Module]) -> Iterator[None]:
    """Candidate blocks in eval mode inside: batch statistics are theirs, not a batch's, and stay as they are."""
    modes = [(m, m.training) for block in blocks for m in block.modules()]
    try:
        for block in blocks:
            block.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


class Taps:
    """Forward hooks that keep what candidates read and write during one forward pass.

    With gradients on, each tapped output is part of the graph (the first one its leaf), so the
    gradient of the loss with respect to all streams comes from one data-only backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: list[str],
        *,
        with_gradient: bool,
        beside: tuple[str, ...] = (),
        reading: frozenset[str] | None = None,
        copying: bool = False,
    ) -> None:
        self._model, self._paths, self._with_gradient, self._beside = model, paths, with_gradient, beside
        self._reading = frozenset(paths) if reading is None else reading
        self._handles: list[Any] = []
        self._versions: dict[str, int] = {}
        self.copying = copying or any(getattr(m, "inplace", False) for m in model.modules())
        """Whether modules after a stream get a copy of it, for some may write into what they read."""
        self.read: dict[str, Tensor] = {}
        """What the module at a path read."""
        self.stream: dict[str, Tensor] = {}
        """What it wrote."""

    def __enter__(self) -> "Taps":
        """Attach the hooks."""
        try:
            self.clear()
            for path in self._paths:
                hook = self._hook(path)
                self._handles.append(resolve(self._model, path).register_forward_hook(hook))
            for path in self._beside:
                self._handles.append(resolve(self._model, path).register_forward_pre_hook(self._listen(path)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Detach them."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Forget the last forward pass."""
        self.read.clear()
        self.stream.clear()

    @property
    def overwritten(self) -> bool:
        """Whether the network has written into a stream after it was tapped: run again with ``copying``."""
        return any(stream._version != self._versions[path] for path, stream in self.stream.items())

    def check(self) -> None:
        """All tapped modules have run; to be called after each forward pass.

        Raises:
            SiteError: If one has not.
        """
        missing = [p for p in self._paths if p not in self.stream] + [p for p in self._beside if p not in self.read]
        if missing:
            raise SiteError(f"{missing[0]!r} does not run in a forward pass of these inputs: no block can go there")

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if path in self.stream:
                raise SiteError(
                    f"{path!r} runs more than once in a forward pass (a shared module), and so would a block there: "
                    "choose a module that runs once"
                )
            stream = stream_of(output, path=path)
            first = self._with_gradient and not stream.requires_grad
            if first:
                stream = stream.detach().requires_grad_()
            if self.copying or first:
                output = with_stream(output, stream.clone())
            if path in self._reading:
                self.read[path] = args[0].detach() if args and isinstance(args[0], Tensor) else stream.detach()
            self.stream[path], self._versions[path] = stream, stream._version
            return output

        return hook

    def _listen(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self.read[path] = args[0].detach()

        return hook


def is_projected(block: nn.Module) -> bool:
    """Whether a block is a zero projection of features, so that its score has a closed form."""
    return isinstance(block, Block) and is_plain(block.project)


def is_plain(project: nn.Module) -> bool:
    """Whether a projection's matrix multiplies unfolded features: no groups, no stride, zeros as padding."""
    if isinstance(project, nn.Conv2d):
        plain = project.groups == 1 and project.padding_mode == "zeros" and not isinstance(project.padding, str)
        return plain and set(project.stride) == {1}
    return isinstance(project, Projection)


def beside_of(model: nn.Module, candidate: Candidate) -> list[nn.Linear | nn.Conv2d]:
    """The existing projections whose features are taken off a candidate's score.

    Raises:
        SiteError: If it is no linear map or convolution onto the candidate's rows.
    """
    found = []
    for path in candidate.beside:
        module = resolve(model, path)
        project = getattr(candidate.block, "project", None)
        if not is_plain(module) or not is_projected(candidate.block) or not shares_features(project):  # type: ignore[arg-type]
            raise SiteError(
                f"{path!r} is a {type(module).__name__} beside a {type(project).__name__}: only features of linear "
                "maps and plain convolutions can be taken off a block with a full projection"
            )
        rows, own = projection_shape(module)[0], projection_shape(project)[0]  # type: ignore[arg-type]
        if rows != own:
            raise SiteError(f"{path!r} writes {rows} channels, the block at {candidate.path!r} writes {own}")
        found.append(module)
    return found  # type: ignore[return-value]


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Outputs for inputs that are a tensor, or a mapping of keyword arguments.

    Raises:
        UserError: If the network cannot take them.
    """
    try:
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    except GrowthError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as error:
        seen = {k: _described(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else _described(inputs)
        raise UserError(f"{type(model).__name__} cannot take inputs {seen}: {error}") from error


def _described(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def first_samples(inputs: Any, num: int) -> Any:
    """The first samples of a batch of inputs."""
    return slice_samples(inputs, 0, num)


def slice_samples(inputs: Any, start: int, stop: int) -> Any:
    """Some consecutive samples of a batch of inputs."""
    if isinstance(inputs, Mapping):
        return {k: v[start:stop] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return inputs[start:stop]


def num_inputs(inputs: Any) -> int:
    """Samples in a batch of inputs."""
    return len(next(iter(inputs.values()))) if isinstance(inputs, Mapping) else len(inputs)


def sum_loss(loss: Loss, outputs: Any, targets: Any, *, reduction: Reduction) -> Tensor:
    """The sum of per-sample losses, from a loss that averages, sums, or does neither.

    Raises:
        UserError: If the loss cannot take these outputs and targets, or gives the wrong shape.
    """
    num = len(targets)
    try:
        value = loss(outputs, targets)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        seen = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(
            f"the loss cannot take outputs {seen} and targets {tuple(getattr(targets, 'shape', (num,)))}: {error}"
        ) from error
    return summed(value, reduction=reduction, num_samples=num)


def summed(loss_value: Tensor, *, reduction: Reduction, num_samples: int) -> Tensor:
    """The sum of per-sample losses, from the value of a loss with this reduction.

    Raises:
        UserError: If the value has another shape than the reduction promises.
    """
    if reduction == "none":
        if loss_value.numel() % num_samples or not loss_value.numel():
            raise UserError(
                f"with reduction 'none' the loss must give one number (or one row) a sample: got shape "
                f"{tuple(loss_value.shape)} for {num_samples} samples"
            )
        return loss_value.reshape(num_samples, -1).sum()
    if loss_value.numel() != 1:
        raise UserError(
            f"with reduction {reduction!r} the loss must give one number, got shape {tuple(loss_value.shape)}: "
            "use reduction 'none' for per-sample losses"
        )
    return loss_value.reshape(()) * (num_samples if reduction == "mean" else 1)
