"""Cross entropy of the output layer, without ever holding all logits.

4,096 positions x 6,400 tokens are 105 MB of float32 logits, and three times that with softmax and
gradients. Here they exist for a chunk of positions at a time, and what the backward pass needs of a
chunk is computed while its logits are there:

    d loss / d logits = softmax(logits) - one-hot(target)

so nothing is computed twice (cf. arXiv:2411.09009, arXiv:2410.10989).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_TARGET = -100  # marks positions that do not count
CHUNK = 512  # positions: 13 MB of float32 logits at 6,400 tokens, as much as a cache may hold


def output_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the targets that count: a float32 scalar.

    hidden (N, C) are final states, weight (V, C) the output matrix, targets (N,) int64. Equal to
    F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum") to rounding, as are
    its gradients. Matrix products run in autocast's dtype where that is on.
    """
    return OutputLoss.apply(hidden, weight, targets, torch.is_grad_enabled())


class OutputLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) \
            else hidden.dtype
        matrix = weight.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), CHUNK):
                part = slice(start, start + CHUNK)
                states, wanted = hidden[part].to(dtype), targets[part, None]  # (n, C), (n, 1)
                counts = wanted != IGNORED_TARGET
                wanted = wanted.where(counts, 0)
                log_probs = F.linear(states, matrix).float().log_softmax(-1)  # (n, V)
                loss -= log_probs.gather(1, wanted).where(counts, 0).sum()
                if needs_grad:
                    grad = log_probs.exp_()  # the probabilities, in the same memory
                    grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0))
                    grad = grad.mul_(counts).to(dtype)
                    grad_hidden[part] = grad @ matrix
                    grad_weight += grad.T @ states
                    del grad
                del log_probs  # or it would live on beside the next chunk's logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None
