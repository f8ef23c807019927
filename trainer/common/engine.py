"""From a loss to changed weights, on one process in plain PyTorch."""

import torch
from torch import Tensor, nn

UPDATED, BACKED_OFF, NOT_FINITE = 0, 1, 2  # what became of a step


class Engine:
    """Backward, then unscale, clip, step and zero, in the order that mixed precision needs.

    With float16 the scaler multiplies the loss so that small gradients do not vanish, and divides
    it again before the update (arXiv:1710.03740); in other dtypes it is disabled and does nothing.
    A step whose loss or gradient is not finite changes no weight in any dtype. What became of the
    last step is in `outcome`, and their number in `skipped_steps`, scalars on the device: nothing
    here waits for it. The optimizer has to be a fused one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device,
                 dtype: torch.dtype):
        self.model, self.optimizer = model, optimizer
        self.dtype = str(dtype).removeprefix("torch.")
        self.outcome = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of loss to what earlier micro-batches of the step left."""
        self.scaler.scale(loss).backward()

    def update(self, lr: float, grad_clip: float, nats: Tensor) -> Tensor:
        """One optimizer step; returns the gradient's norm before clipping, a scalar on the device.

        grad_clip 0 leaves the gradient as it is. nats is the step's loss, on the device.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = self.scaler.scale(torch.ones_like(nats))  # 1 if the scaler is disabled
        self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip or torch.inf)
        finite = grad_norm.isfinite() & nats.isfinite()
        # Too large a scale, not bad data: the scaler halves it, and that is all there is to it.
        backed_off = ~finite & nats.isfinite() & (scale > 1)
        self.outcome = torch.where(finite, UPDATED, torch.where(backed_off, BACKED_OFF, NOT_FINITE))
        self.skipped_steps += ~finite
        # A fused optimizer does nothing where found_inf is 1, and asks no question of the host.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, (~finite).float()
        self.optimizer.step()  # not scaler.step(), which knows of gradients only, not of the loss
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def state_dict(self) -> dict:
        """Weights and moments in float32, under the parameters' names, and the scaler's state."""
        moments = {name: dict(self.optimizer.state[parameter])
                   for name, parameter in self.model.named_parameters()
                   if parameter in self.optimizer.state}
        return {"model": self.model.state_dict(), "optimizer": moments,
                "scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict) -> None:
        """Puts back what `state_dict` gave, on whatever device the model now is."""
        self.model.load_state_dict(state["model"])
        for name, parameter in self.model.named_parameters():
            if name in state["optimizer"]:
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True)
                    for key, value in state["optimizer"][name].items()
                }
        self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps.copy_(state["skipped_steps"])
