"""From a loss to changed weights: one process, or many with the whole model each."""

import contextlib

import torch
from torch import Tensor, nn

from trainer.common.distributed import Dist
from trainer.common.reducer import Reducer

UPDATED, BACKED_OFF, NOT_FINITE = 0, 1, 2  # what became of a step


class Engine:
    """Backward, then unscale, clip, step and zero, in the order that mixed precision needs.

    With float16 the scaler multiplies the loss so that small gradients do not vanish, and divides
    it again before the update (arXiv:1710.03740); in other dtypes it is disabled and does nothing.
    A step whose loss or gradient is not finite changes no weight in any dtype. What became of the
    last step is in `outcome`, and their number in `skipped_steps`, scalars on the device: nothing
    here waits for it. The optimizer has to be a fused one.
    """

    can_repeat = True  # a step that ran out of memory, in smaller micro-batches

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist,
                 dtype: torch.dtype):
        self.model, self.optimizer, self.dist = model, optimizer, dist
        self.reducer: Reducer | None = None
        self.dtype = str(dtype).removeprefix("torch.")
        # Now, before ZeRO sends them elsewhere.
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.outcome = torch.zeros((), dtype=torch.int64, device=dist.device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=dist.device)
        self.scaler = torch.amp.GradScaler(dist.device.type, enabled=dtype == torch.float16)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the loop calls it. All processes begin with the weights of rank 0."""
        if self.dist.world_size > 1:
            self.reducer = Reducer(self.model)
        return model

    @property
    def grows(self) -> bool:
        """True while some blocks of the model are not in use yet, and get no gradient."""
        return self.model.depth < self.model.config.n_layers

    def sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Context of a forward and backward; gradients are summed over all processes in the last
        one of a step only.
        """
        return self.reducer.summing() if is_last and self.reducer else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of loss to what earlier micro-batches of the step left."""
        self.scaler.scale(loss).backward()

    def abandon(self) -> None:
        """Ends this process's part in a step that it cannot finish: no other waits for it."""
        if self.reducer:
            self.reducer.abandon()

    def drop_gradients(self) -> None:
        """Forgets the gradients of a step, when they have been used or are not to be."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.reducer:
            self.reducer.reset()

    def bytes_to_come(self) -> int:
        """Bytes that updates have yet to allocate: two moments for each parameter without any.

        Muon keeps one, and needs about as much again while it works.
        """
        return sum(8 * parameter.numel() for parameter in self.model.parameters()
                   if parameter not in self.optimizer.state)

    def update(self, lr: float, grad_clip: float, nats: Tensor) -> Tensor:
        """One optimizer step; returns the gradient's norm before clipping, a scalar on the device.

        grad_clip 0 leaves the gradient as it is. nats is the step's loss, on the device.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        scale = self.scaler.scale(torch.ones_like(nats))  # 1 if the scaler is disabled
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip(grad_clip or torch.inf)
        finite = grad_norm.isfinite() & nats.isfinite()
        # Too large a scale, not bad data: the scaler halves it, and that is all there is to it.
        backed_off = ~finite & nats.isfinite() & (scale > 1)
        self.outcome = torch.where(finite, UPDATED, torch.where(backed_off, BACKED_OFF, NOT_FINITE))
        self.skipped_steps += ~finite
        # A fused optimizer does nothing where found_inf is 1, and asks no question of the host.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, (~finite).float()
        self.optimizer.step()  # not scaler.step(), which knows of gradients only, not of the loss
        self.scaler.update()
        self.drop_gradients()
        return grad_norm

    def clip(self, largest: float) -> Tensor:
        """Scales the gradient down to the largest allowed norm; returns the norm it had."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def state_dict(self) -> dict:
        """Weights and moments in float32, under the parameters' names, and the scaler's state.

        All are copies in host memory. Every process has to call it; the main one gets something.
        """
        weights, moments = {}, {}
        for name, parameter in self.model.named_parameters():
            weights[name] = self.copy(self.read(parameter))
            moments[name] = {key: self.copy(self.read(parameter, key))
                             for key in self.moments(parameter)}
        return {"model": weights, "optimizer": moments, "scaler": self.scaler.state_dict(),
                "skipped_steps": self.copy(self.skipped_steps)}

    def copy(self, tensor: Tensor) -> Tensor | None:
        """Of a whole value, one at a time: no device has to hold the whole state."""
        return tensor.detach().to("cpu", copy=True) if self.dist.is_main else None

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Puts back what `state_dict` gave, whatever engine, device and processes it came from."""
        for name, parameter in self.model.named_parameters():
            self.write(parameter, state["model"][name])
            for key, value in state["optimizer"][name].items():
                self.write(parameter, value, key)
        self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps.copy_(state["skipped_steps"])

    def moments(self, parameter: nn.Parameter) -> list[str]:
        """What the optimizer keeps for a parameter, e.g. `exp_avg`; nothing before the first step.
        """
        return list(self.optimizer.state.get(parameter, {}))

    def read(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """A parameter or one of its moments, whole."""
        return parameter.detach() if moment is None else self.optimizer.state[parameter][moment]

    def write(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        """Replaces a parameter or one of its moments by (a copy of) a whole value."""
        if moment is None:
            parameter.copy_(value)
        else:
            self.optimizer.state[parameter][moment] = value.to(parameter.device, copy=True)
