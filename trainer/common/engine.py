"""From a loss to changed weights, on one process in plain PyTorch."""

import torch
from torch import Tensor


class Engine:
    """Backward, then unscale, clip, step and zero, in the order that mixed precision needs.

    With float16 the scaler multiplies the loss so that small gradients do not vanish, and divides
    it again before the update (arXiv:1710.03740); in other dtypes it is disabled and does nothing.
    A step whose gradient is not finite changes no weight in any dtype; it is counted in
    `skipped_steps`, a scalar on the device. The optimizer has to be a fused one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of loss to what earlier micro-batches of the step left."""
        self.scaler.scale(loss).backward()

    def update(self, lr: float, grad_clip: float) -> Tensor:
        """One optimizer step; returns the gradient's norm before clipping, a scalar on the device.

        grad_clip 0 leaves the gradient as it is.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, grad_clip or torch.inf)
        not_finite = ~grad_norm.isfinite()
        self.skipped_steps += not_finite
        # A fused optimizer does nothing where found_inf is 1, and asks no question of the host.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, not_finite.float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm
