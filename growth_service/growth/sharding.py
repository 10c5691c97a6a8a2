"""Growth of networks whose parameters are sharded over ranks (FSDP2, ``fully_shard``).

What a network that is not sharded needs of this is one question: whether a process group exists. The library is
imported after that.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from growth_service.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_like(block: nn.Module, module: nn.Module, model: nn.Module) -> None:
    """Shard a new block over the ranks that share its module's parameters, else the network's; nothing otherwise.

    A block left whole would be trained by every rank on its own samples alone, and the ranks would drift apart.
    """
    mesh = _mesh_of(module) or _mesh_of(model)
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    fully_shard(block, mesh=mesh)


def begin_again(model: nn.Module) -> None:
    """After a change of modules, let the next forward pass find out anew which sharded one is the outermost.

    A module sharded after the first pass would take itself for another outermost one, and gradients would be lost.
    There is no public way to say so (torch 2.14).
    """
    if not _grouped():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            state._is_root = None
            state._state_ctx = type(state._state_ctx)()


def check_unsharded(model: nn.Module, *, what: str) -> None:
    """Refuse steps that resize old parameters.

    Raises:
        UserError: If parameters are sharded.
    """
    if _mesh_of(model) is not None:
        raise UserError(
            f"{what} of a network sharded by fully_shard is not supported: grow it before it is sharded, or load its "
            "checkpoint into an unsharded network, grow that, and shard it again"
        )


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with the shards of each tensor gathered from all ranks, which must all ask for it."""
    if not _grouped():
        return state
    from torch.distributed.tensor import DTensor

    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _mesh_of(module: nn.Module) -> "DeviceMesh | None":
    """Device mesh of the first sharded parameter."""
    if not _grouped():
        return None
    from torch.distributed.tensor import DTensor

    return next((p.device_mesh for p in module.parameters() if isinstance(p, DTensor)), None)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
