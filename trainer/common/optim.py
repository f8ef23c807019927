"""The optimizer and the learning-rate schedule."""

import math

import torch
from torch import nn


def make_adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) with betas 0.9 / 0.95 and weight decay on matrices only.

    Decay pulls weights towards zero; for a norm's gain that is a pull away from "leave it as it
    is", so vectors are spared. The learning rate is set at each step by the loop.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # One kernel for the whole update, where the device has it.
    fused = matrices[0].device.type in ("cuda", "cpu", "mps")
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


def warmup_cosine(step: int, total_steps: int, warmup_steps: int, peak: float, min_ratio: float
                  ) -> float:
    """Learning rate of step 0, 1, ..., total_steps - 1.

    It rises linearly to the peak over warmup_steps (at most a tenth of the run, so that a short run
    reaches it), then follows half a cosine down to min_ratio * peak at the last step
    (arXiv:1608.03983, without restarts).
    """
    warmup_steps = min(warmup_steps, total_steps // 10)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return peak * (min_ratio + (1 - min_ratio) * cosine)
