"""The engine for `--shard full`: each process holds a part of every matrix (FSDP2, ZeRO stage 3).

For models that outgrow one card: weights, gradients and moments take 1/world_size of the memory,
and each block's weights are put together just before they are used (arXiv:2304.11277). The loop,
the files and the numbers are those of the plain engine.
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, distribute_tensor

from model.transformer import MiniMindLM
from trainer.common.distributed import Dist
from trainer.common.engine import Engine


def shard(model: MiniMindLM, dist: Dist) -> None:
    """Splits every parameter over all processes, in place. The optimizer has to be made after it.
    """
    mesh = init_device_mesh(dist.device.type, (dist.world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class ShardedEngine(Engine):
    """The plain engine over parameters that are split."""

    can_repeat = False  # its parts travel in every forward and backward

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist,
                 dtype: torch.dtype):
        super().__init__(model, optimizer, dist, dtype)
        # Each process sees a part of the gradient; this one asks all of them before it backs off.
        self.scaler = ShardedGradScaler(dist.device.type, enabled=dtype == torch.float16,
                                        process_group=torch.distributed.group.WORLD)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # in every micro-batch: whole gradients would not fit

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.dist.world_size)  # FSDP2 gives the mean over processes

    def clip(self, largest: float) -> Tensor:
        return super().clip(largest).full_tensor()

    def state_dict(self) -> dict:
        self.model.reshard()  # a validation leaves the last used weights whole
        return super().state_dict()

    def read(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        part = super().read(parameter, moment)
        return part.full_tensor() if isinstance(part, DTensor) else part

    def write(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        if value.shape == parameter.shape:  # all but the count of steps
            value = distribute_tensor(value.to(self.dist.device), parameter.device_mesh,
                                      parameter.placements)
        super().write(parameter, value, moment)
