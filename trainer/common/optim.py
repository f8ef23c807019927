"""The optimizer that --optimizer asks for. The learning rate is set at each step by the loop."""

from argparse import Namespace

import torch
from torch import nn

from trainer.common.muon import Muon

LEARNING_RATES = {"muon": 3e-3, "adamw": 5e-4}
EMBEDDING_SCALE = 4.0  # beside Muon, embedding and norms learn with so many times its rate


def splits_matrices(args: Namespace) -> bool:
    """True if the engine may keep parts of matrices, which Muon can do nothing with."""
    return args.deepspeed is not None or args.shard == "full"


def make_optimizer(model: nn.Module, args: Namespace, dtype: torch.dtype
                   ) -> torch.optim.Optimizer:
    """AdamW on all parameters, or Muon on the hidden matrices and AdamW on the rest.

    dtype: of matrix products. Settles what `--optimizer auto` is, and the learning rate where none
    was given, unless a resumed run has done so.
    """
    if args.optimizer == "auto":
        args.optimizer = "adamw" if splits_matrices(args) else "muon"
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATES[args.optimizer]
    if args.optimizer == "adamw":
        return make_adamw(model, args.weight_decay)
    hidden = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    adamw = make_adamw(model, args.weight_decay, without=hidden)
    for group in adamw.param_groups:
        group["lr_scale"] = EMBEDDING_SCALE
    return Muon(hidden, adamw, args.weight_decay, dtype)


def make_adamw(model: nn.Module, weight_decay: float, without: list[nn.Parameter] = ()
               ) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) with betas 0.9 / 0.95 and weight decay on matrices only.

    Decay pulls weights towards zero; for a norm's gain that is a pull away from "leave it as it
    is", so vectors are spared. `without`: parameters that another optimizer moves.
    """
    others = {id(parameter) for parameter in without}
    mine = [parameter for parameter in model.parameters() if id(parameter) not in others]
    groups = [
        {"params": [parameter for parameter in mine if parameter.dim() >= 2],
         "weight_decay": weight_decay},
        {"params": [parameter for parameter in mine if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    # One kernel for the whole update, and one that heeds the engine's `found_inf`.
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
