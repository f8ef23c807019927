"""The engine for `--deepspeed FILE`: ZeRO by DeepSpeed, behind the verbs of the plain engine.

    deepspeed --master_port=29500 --num_gpus=2 train_pretrain.py --deepspeed ds_config.json

ZeRO (arXiv:1910.02054) splits the optimizer's moments (stage 1), the gradients (2) and the weights
(3) over the processes. The file says how, under `zero_optimization`; whatever our flags say already
is taken from them. The weights stay float32 under our autocast, as everywhere here. DeepSpeed reads
the gradient's norm on the host in every step, so this engine waits where the plain one does not.
Resume files are the plain engine's: one can go on where another ended (with AdamW).
"""

import contextlib
import importlib
import json
import warnings
from argparse import Namespace
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from trainer.common.distributed import Dist
from trainer.common.engine import BACKED_OFF, NOT_FINITE, UPDATED, Engine

LOWEST_SCALE = 2.0**-14


class DeepSpeedEngine(Engine):
    """`Engine` by DeepSpeed; `optimizer` is the one that the script made."""

    can_repeat = False  # its parts travel in every forward and backward

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist,
                 dtype: torch.dtype, args: Namespace):
        super().__init__(model, optimizer, dist, dtype)
        # DeepSpeed calls functions that this torch advises against, in every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        # On a CPU DeepSpeed would compile an operator, under a lock that a killed process leaves
        # behind for all after it to wait at; gloo does its work as well. (By its name: what
        # `deepspeed.comm.torch` finds is the package torch.)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        # On a GPU DeepSpeed would turn off an autocast that its file does not ask for: ours.
        deepspeed.runtime.engine.autocast_if_enabled = lambda engine: contextlib.nullcontext()
        config = read_config(args.deepspeed)
        self.stage = config["zero_optimization"]["stage"]
        config |= {"train_micro_batch_size_per_gpu": 1,  # not used: our loop cuts
                   "gradient_accumulation_steps": 1,  # `sync` says where a step ends
                   "gradient_clipping": args.grad_clip, "steps_per_print": None}
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False)
        # DeepSpeed makes the moments in its first step, and in stage 3 with a step on nothing.
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else \
            self.zero.single_partition_of_fp32_groups
        for part in flat:
            optimizer.state[part] = {"step": torch.zeros((), device=part.device),
                                     "exp_avg": torch.zeros_like(part),
                                     "exp_avg_sq": torch.zeros_like(part)}
        self.steps = [optimizer.state[part]["step"] for part in flat]
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.engine

    def sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        self.engine.set_gradient_accumulation_boundary(is_last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        # An infinite loss can have a finite gradient; DeepSpeed looks at the gradient only.
        loss = loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        if self.scaler.is_enabled():
            self.zero.override_loss_scale(self.scaler.get_scale())
        # It gives the mean over processes, and here it is to be the sum.
        self.engine.backward(loss * self.dist.world_size, scale_wrt_gas=False)

    def update(self, lr: float, grad_clip: float, nats: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        scale, overflow = self.scaler.get_scale(), self.zero.overflow
        backed_off = overflow and bool(nats.isfinite()) and scale > 1
        code = BACKED_OFF if backed_off else NOT_FINITE if overflow else UPDATED
        self.outcome = torch.tensor(code, device=self.dist.device)
        self.skipped_steps += overflow
        if self.scaler.is_enabled():
            self.adapt_scale(overflow)
        return torch.as_tensor(float(self.zero._global_grad_norm), device=self.dist.device)

    def adapt_scale(self, overflow: bool) -> None:
        """GradScaler's rule, which can be asked for only together with its own unscaling."""
        state = self.scaler.state_dict()
        tracker = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] = max(state["scale"] * state["backoff_factor"], LOWEST_SCALE)
        elif tracker == state["growth_interval"]:
            state["scale"], tracker = state["scale"] * state["growth_factor"], 0
        self.scaler.load_state_dict({**state, "_growth_tracker": tracker})

    def moments(self, parameter: nn.Parameter) -> list[str]:
        return ["step", "exp_avg", "exp_avg_sq"]

    def read(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        if moment == "step":
            return self.steps[0]
        if moment is None:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, moment)

    def write(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        value = value.to(self.dist.device)
        if moment == "step":
            for step in self.steps:
                step.copy_(value)
        elif moment is not None:
            safe_set_full_optimizer_state(parameter, value, moment)
        else:
            safe_set_full_fp32_param(parameter, value)  # the optimizer's copy; now the model's
            whole = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) \
                if self.stage == 3 else contextlib.nullcontext()
            with whole:
                parameter.data.copy_(value)


def read_config(path: Path) -> dict:
    """The ZeRO options of --deepspeed. The flags' check has been through it already."""
    return json.loads(path.read_text("utf-8"))
