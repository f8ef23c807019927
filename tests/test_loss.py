"""The output layer's loss and gradient checkpointing against the plain thing."""

import pytest
import torch
import torch.nn.functional as F

from model import loss
from model.LMConfig import LMConfig
from model.loss import IGNORED_TARGET, output_loss
from model.transformer import MiniMindLM


def plain_loss(hidden, weight, targets):
    """All logits at once, by torch."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum",
                           ignore_index=IGNORED_TARGET)


def value_and_gradients(function, dtype, positions, scale=1.0):
    """(loss, gradient of the states, gradient of the matrix) under autocast to dtype."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, 32, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(300, 32) / 5)
    targets = torch.randint(0, 300, (positions,))
    targets[torch.rand(positions) < 0.3] = IGNORED_TARGET
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        value = function(hidden, weight, targets)
    (value * scale).backward()
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2),
                                              (torch.float16, 3e-3)])
@pytest.mark.parametrize("positions", [1, 7, 8, 20])
def test_equal_to_the_plain_loss(monkeypatch, dtype, close, positions):
    """Value and gradients are the plain loss's to rounding; chunks of 8, the last one shorter."""
    monkeypatch.setattr(loss, "CHUNK", 8)
    ours = value_and_gradients(output_loss, dtype, positions, scale=3.0)
    plain = value_and_gradients(plain_loss, dtype, positions, scale=3.0)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=close, atol=close * float(other.abs().max()))


def test_nothing_that_counts(monkeypatch):
    """A20: a chunk, or all, without a supervised target: loss 0 and gradient 0, never NaN."""
    monkeypatch.setattr(loss, "CHUNK", 4)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.nn.Parameter(torch.randn(9, 4))
    value = output_loss(hidden, weight, torch.full((8,), IGNORED_TARGET))
    value.backward()
    assert value == 0 and not hidden.grad.any() and not weight.grad.any()


def test_logits_exist_a_chunk_at_a_time(monkeypatch):
    """The largest tensor that the loss makes has CHUNK rows of logits, not all of them."""
    monkeypatch.setattr(loss, "CHUNK", 48)
    largest = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2:
                largest.append(result.shape[0] * (result.shape[1] == 300))
            return result

    with Noted():
        value_and_gradients(output_loss, torch.float32, 256)
    # 300 columns: logits, and the matrix transposed, which has 32 rows.
    assert max(largest) == 48


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_nothing(dropout):
    """Gradients are those without, bit for bit, and so are dropout and the random state after."""
    def run(gradient_checkpointing):
        torch.manual_seed(0)
        config = LMConfig(dim=32, n_layers=3, n_heads=4, vocab_size=60, dropout=dropout)
        model = MiniMindLM(config, gradient_checkpointing)
        ids = torch.randint(0, 60, (2, 12))
        doc_ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
        value = model(ids, doc_ids=doc_ids, targets=ids.roll(-1, 1))
        value.backward()
        return value, *(p.grad for p in model.parameters()), torch.rand(1)

    for plain, checkpointed in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, checkpointed)


def test_gradient_checkpointing_keeps_less():
    """Between forward and backward a block keeps its input, not its insides."""
    def kept(gradient_checkpointing):
        model = MiniMindLM(LMConfig(dim=64, n_layers=4, n_heads=4), gradient_checkpointing)
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.zeros(2, 100, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, targets=ids)
        return sum(sizes.values()) - sum(p.nbytes for p in model.parameters())

    assert kept(True) < kept(False) / 2
