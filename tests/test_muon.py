"""Muon against the singular value decomposition and a plain loop in float64."""

from argparse import Namespace

import pytest
import torch

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from trainer.common import muon
from trainer.common.distributed import Dist
from trainer.common.engine import Engine
from trainer.common.muon import COEFFICIENTS, LOWEST, Muon, orthogonalise
from trainer.common.optim import EMBEDDING_SCALE, LEARNING_RATES, make_adamw, make_optimizer

ALONE = Dist(0, 0, 1, torch.device("cpu"))
LR, DECAY, MOMENTUM = 0.01, 0.1, 0.95


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32), (1, 8)])
def test_orthogonalise_is_the_polar_factor(shape):
    """U V^T of the decomposition: same singular vectors, and singular values near 1."""
    torch.manual_seed(0)
    stack = torch.randn(3, *shape, dtype=torch.float64)
    for matrix, result in zip(stack, orthogonalise(stack, stack.dtype)):
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        inside = U.T @ result @ Vh.T  # diagonal, if the vectors are the same
        values = inside.diagonal()
        torch.testing.assert_close(inside, torch.diag(values), rtol=0, atol=1e-6)
        large = S > LOWEST * (S**4).sum() ** 0.25
        assert large.sum() > 0.9 * len(S) and (values >= 0).all()
        assert (values[large] > 0.95).all() and (values < 1.05).all()


def test_each_step_is_the_nearest_of_its_kind():
    """Chebyshev: a x + b x^3 + c x^5 is nearest to 1 if its error is greatest four times in turn,
    below and above. Its image is the next one's range.
    """
    low, high = LOWEST, 1.0
    for a, b, c in COEFFICIENTS:
        x = torch.linspace(low, high, 100_001, dtype=torch.float64)
        error = a * x + b * x**3 + c * x**5 - 1
        greatest = error.abs().max()
        signs = error[error.abs() > greatest * (1 - 1e-6)].sign().unique_consecutive()
        assert signs.tolist() == [-1, 1, -1, 1]
        low, high = 1 - greatest, 1 + greatest
    assert greatest < 0.04


def test_of_nothing_comes_nothing():
    assert (orthogonalise(torch.zeros(2, 4, 6), torch.float32) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 24), (64, 64), (128, 32)])
def test_no_spectrum_explodes(dtype, shape):
    """One direction or all, and what rounding adds: singular values stay below 1.15."""
    torch.manual_seed(0)
    full = torch.randn(3, *shape)
    one = torch.randn(3, shape[0], 1) @ torch.randn(3, 1, shape[1])
    for stack in (full, one, one + 0.01 * full, full * torch.logspace(0, -4, shape[1])):
        assert torch.linalg.matrix_norm(orthogonalise(stack, dtype).float(), 2).max() < 1.15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_the_size_of_a_gradient_does_not_matter(dtype, size):
    """In 16 bits neither: float16 ends at 65,504 and at 6e-8."""
    torch.manual_seed(0)
    stack = torch.randn(2, 16, 24)
    plain, scaled = orthogonalise(stack, dtype), orthogonalise(size * stack, dtype)
    assert scaled.dtype == dtype and scaled.isfinite().all()
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0.02)
    torch.testing.assert_close(plain.float(), orthogonalise(stack, torch.float32), rtol=0,
                               atol=0.05)


def test_weight_decay_acts_on_hidden_matrices():
    """With no gradient a step is the decay alone, to the bit."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in optimizer.hidden_group["params"]]
    optimizer.step()
    for parameter, was in zip(optimizer.hidden_group["params"], before):
        torch.testing.assert_close(parameter.detach(), was * (1 - LR * DECAY), rtol=0, atol=0)


def test_stacks_are_cut(monkeypatch):
    """How many matrices are worked on together changes nothing beyond rounding."""
    results = []
    for numbers in (1, 2**22):
        monkeypatch.setattr(muon, "STACK", numbers)
        model = tiny_model()
        optimizer = tiny_optimizer(model)
        set_gradients(model, 0)
        optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_the_engine_gives_each_group_its_rate():
    """The embedding and the norms learn faster than the schedule says, hidden matrices do not."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    engine = Engine(model, optimizer, ALONE, torch.float32)
    set_gradients(model, 0)
    engine.update(0.5, 1.0, torch.tensor(1.0))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5 * EMBEDDING_SCALE,
                                                                 0.5 * EMBEDDING_SCALE]


def tiny_model() -> MiniMindLM:
    torch.manual_seed(0)
    return MiniMindLM(LMConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50,
                               hidden_dim=48))


def tiny_optimizer(model: MiniMindLM) -> Muon:
    args = Namespace(optimizer="auto", deepspeed=None, shard="none", weight_decay=DECAY,
                     learning_rate=None)
    optimizer = make_optimizer(model, args, torch.float32)
    assert args.optimizer == "muon" and args.learning_rate == LEARNING_RATES["muon"]
    assert {group.get("lr_scale") for group in optimizer.param_groups[1:]} == {EMBEDDING_SCALE}
    for group in optimizer.param_groups:
        group["lr"] = LR
    return optimizer


def set_gradients(model: MiniMindLM, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_three_steps_are_the_formula():
    """Hidden matrices follow the docstring's three lines, all others plain AdamW."""
    model, twin, plain = tiny_model(), tiny_model(), {}
    adamw = make_adamw(twin, DECAY)
    for group in adamw.param_groups:
        group["lr"] = LR
    hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name}
    assert len(hidden) == 2 * 7
    for name, parameter in model.named_parameters():
        plain[name] = [parameter.detach().double(), torch.zeros(parameter.shape).double()]
    optimizer = tiny_optimizer(model)
    for seed in range(3):
        for one in (model, twin):
            set_gradients(one, seed)
        optimizer.step()
        adamw.step()
        for name, parameter in model.named_parameters():
            if name not in hidden:
                continue
            W, M = plain[name]
            G = parameter.grad.double()
            M = MOMENTUM * M + (1 - MOMENTUM) * G
            U, _, Vh = torch.linalg.svd((1 - MOMENTUM) * G + MOMENTUM * M, full_matrices=False)
            W = (1 - LR * DECAY) * W - LR * 0.2 * max(W.shape) ** 0.5 * (U @ Vh)
            plain[name] = [W, M]
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters()):
        if name in hidden:
            W, M = plain[name]
            moved = (parameter.double() - W).norm() / (0.2 * LR * W.numel() ** 0.5)
            assert moved < 0.3, name  # singular values are near 1, not 1
            torch.testing.assert_close(optimizer.state[parameter]["momentum"].double(), M)
        else:
            torch.testing.assert_close(parameter, other, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_step_that_is_not_finite_does_nothing(value):
    """found_inf 1 leaves weights and momentum as they are; found_inf 0 does not."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    set_gradients(model, 0)
    optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = [optimizer.state[p]["momentum"].clone() for p in optimizer.hidden_group["params"]]
    set_gradients(model, 1)
    for parameter in model.parameters():
        parameter.grad.view(-1)[0] = value
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
    for parameter, was in zip(optimizer.hidden_group["params"], momentum):
        torch.testing.assert_close(optimizer.state[parameter]["momentum"], was, rtol=0, atol=0)
    set_gradients(model, 1)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert all(not parameter.equal(before[name]) for name, parameter in model.named_parameters())
