"""The optimizer."""

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
