"""Which engine a run has. All have the same verbs (wrap, sync, backward, update) and one state."""

import os
from argparse import Namespace

import torch

from model.transformer import MiniMindLM
from trainer.common.distributed import Dist
from trainer.common.engine import Engine


def place(model: MiniMindLM, args: Namespace, dist: Dist) -> None:
    """Moves the model to its device; with --shard full, this process's part of every matrix."""
    if args.shard != "full" or dist.world_size == 1:
        model.to(dist.device)
        return
    from trainer.common.sharded_engine import shard

    # Each process keeps a part of its own copy; the other engines send the main one's around.
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    dist.agree("starting weights", repr(total))
    shard(model.to(dist.device), dist)


def make_engine(model: MiniMindLM, optimizer: torch.optim.Optimizer, args: Namespace, dist: Dist,
                dtype: torch.dtype) -> Engine:
    """The engine that --shard and --deepspeed ask for; their packages are loaded only then."""
    if args.deepspeed is not None:
        os.environ.setdefault("DS_ACCELERATOR", dist.device.type)
        from trainer.common.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, optimizer, dist, dtype, args)
    if args.shard == "full" and dist.world_size > 1:
        from trainer.common.sharded_engine import ShardedEngine

        return ShardedEngine(model, optimizer, dist, dtype)
    return Engine(model, optimizer, dist, dtype)
