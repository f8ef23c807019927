"""Muon: the hidden matrices move by orthogonalised momentum, everything else by AdamW.

For a matrix W with gradient G (Jordan et al. 2024, "Muon: an optimizer for hidden layers"):

    M <- beta M + (1 - beta) G
    U S V^T = (1 - beta) G + beta M          looking one step ahead (Nesterov)
    W <- (1 - lr * decay) W - lr * 0.2 sqrt(max(rows, columns)) * U V^T

All directions that the gradient shows get the same say, not only the few large ones. U V^T has an
RMS of 1 / sqrt(max(rows, columns)); the factor brings it to 0.2, about that of an AdamW step
(arXiv:2502.16982, section 2.2). Embedding and norms have no use for it: a row of the embedding is a
vector of its own, and they stay with AdamW. `torch.optim.Muon` is the same update; it is not used
because it always multiplies in bfloat16, which many CPUs emulate, and knows no `found_inf`.
"""

import torch
from torch import Tensor

# Three steps x <- a x + b x^3 + c x^5, which drive singular values in (LOWEST, 1) to about 1: each
# is the polynomial nearest to 1 over the range that the one before leaves (arXiv:2505.16932, "Polar
# Express"; tests/test_muon.py checks that there is no nearer one).
LOWEST = 0.03
COEFFICIENTS = (
    (7.362527758027792, -20.743395646172154, 15.160551758684568),
    (2.9175380442298486, -2.182405382865042, 0.47552921925745756),
    (2.0463101137308266, -1.4294750038250814, 0.39335241059370146),
)
# Beyond its range a polynomial explodes, and bfloat16 rounds by half a percent: each is stretched
# to a range 2 % wider, p(x / MARGIN).
MARGIN = 1.02
STACK = 2**22  # numbers in matrices that are worked on together: enough to keep a GPU busy


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest (semi-)orthogonal matrices U V^T of a stack (n, rows, columns), roughly.

    With S the singular values of a matrix, those above LOWEST times (sum of S^4)^(1/4), which no S
    exceeds, end up within 5 % of 1; smaller ones grow at most 44-fold, measured by that bound, and
    zero stays zero. Products are in dtype, after the norms have been taken out: float16 has no room
    for gradients as they come.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    X = matrices.mT if tall else matrices  # the smaller product X X^T is the cheaper one
    norms = X.norm(dim=(-2, -1), keepdim=True)
    X = (X / norms.clamp(min=torch.finfo(X.dtype).tiny)).to(dtype)
    A = X @ X.mT
    # The norm of X X^T is the sum of S^4: a far closer bound than the norm of X, and at hand.
    bound = (1.01 * A.norm(dim=(-2, -1), keepdim=True).sqrt()).clamp(min=1e-3)
    X, A = X / bound, A / bound.square()
    for step, (a, b, c) in enumerate(COEFFICIENTS):
        if step > 0:
            A = X @ X.mT
        X = a / MARGIN * X + (b / MARGIN**3 * A + c / MARGIN**5 * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Muon for `hidden` (a list of 2-D parameters), fused AdamW for `adamw`'s parameter groups.

    Keeps one float32 `momentum` for each hidden matrix, half of what AdamW keeps. As in torch's
    fused optimizers a step does nothing where the tensor `found_inf` is 1, without a question
    to the host. dtype: of the orthogonalisation, whose products 16 bits suffice for.
    """

    def __init__(self, hidden: list[Tensor], adamw: torch.optim.AdamW, weight_decay: float,
                 dtype: torch.dtype, momentum: float = 0.95):
        super().__init__([{"params": hidden, "weight_decay": weight_decay}],
                         {"lr": 0.0, "momentum": momentum})
        self.hidden_group = self.param_groups[0]
        self.adamw, self.dtype = adamw, dtype
        self.param_groups += adamw.param_groups  # the same objects: a learning rate reaches both
        self.state = adamw.state
        self.grad_scale = self.found_inf = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf
        self.adamw.step()
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in self.hidden_group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        for parameters in by_shape.values():  # a stack at a time: few, large matrix products
            count = max(STACK // parameters[0].numel(), 1)
            for start in range(0, len(parameters), count):
                self.step_of(parameters[start : start + count])

    def step_of(self, parameters: list[Tensor]) -> None:
        """Moves hidden matrices of one shape."""
        group = self.hidden_group
        applied = 1.0 if self.found_inf is None else 1 - self.found_inf
        directions = []
        for parameter in parameters:
            gradient = parameter.grad.nan_to_num(0, 0, 0)  # of a step that will not be
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(gradient, (1 - group["momentum"]) * applied)
            directions.append(gradient.lerp(state["momentum"], group["momentum"]))
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        updates = orthogonalise(torch.stack(directions), self.dtype)
        for parameter, update in zip(parameters, updates):
            parameter.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            parameter.sub_(update * (group["lr"] * scale * applied))
