"""The model against small independent references: loops, complex numbers, a five-line loss."""

import cmath
import math

import pytest
import torch

from model.attention import PAD_DOC_ID, Masked, attention_mask
from model.LMConfig import LMConfig
from model.loss import IGNORED_TARGET
from model.transformer import Attention, MiniMindLM, RMSNorm, rotary_table, rotate


def tiny_config(**changes) -> LMConfig:
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50,
             "hidden_dim": 48}
    return LMConfig(**{**shape, **changes})


def tiny_model(**changes) -> MiniMindLM:
    """Random weights larger than the initialisation's, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = MiniMindLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter)) if parameter.dim() == 1 else \
                parameter.normal_(std=0.2)
    return model


def random_ids(*shape) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def reference_loss(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Cross entropy summed over the targets that count, one position at a time."""
    total = 0.0
    for position, target in zip(logits.flatten(0, 1).double(), targets.flatten().tolist()):
        if target != -100:
            total -= (position[target] - torch.logsumexp(position, 0)).item()
    return total


@pytest.mark.parametrize(("shape", "count"), [
    ({}, 25_829_888),
    ({"dim": 768, "n_layers": 16}, 104_030_976),
])
def test_parameter_count(shape, count):
    """The two documented shapes have the documented sizes, the tied matrix counted once."""
    with torch.device("meta"):
        assert MiniMindLM(LMConfig(**shape)).num_parameters() == count


def test_config_names_every_impossible_field():
    """P6: all impossible sizes are named in one message, and none is accepted."""
    with pytest.raises(ValueError, match=r"(?s)dim=33.*n_kv_heads=3.*dropout=1"):
        tiny_config(dim=33, n_kv_heads=3, dropout=1.0)
    with pytest.raises(ValueError, match=r"(?s)n_layers=0.*vocab_size=-1"):
        tiny_config(n_layers=0, vocab_size=-1)


def test_hidden_dim_is_8_3_of_dim_rounded_up_to_64():
    """The feed-forward size follows DESIGN section 6: 1408 for 512, 2048 for 768."""
    assert LMConfig().hidden_dim == 1408
    assert LMConfig(dim=768).hidden_dim == 2048
    assert LMConfig(hidden_dim=100).hidden_dim == 100


def test_initialisation_and_first_loss():
    """Matrices start at std 0.02 (0.005 where they write to the stream), and so the first loss is
    the documented 8.87, near ln 6400 = 8.764 rather than in the hundreds.
    """
    torch.manual_seed(0)
    model = MiniMindLM(LMConfig())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        writes = "o_proj" in name or "down_proj" in name
        assert parameter.std().item() == pytest.approx(0.005 if writes else 0.02, rel=0.02), name
        assert abs(parameter.mean().item()) < 5e-4, name
    ids, targets = torch.randint(0, 6400, (2, 4, 256))
    with torch.no_grad():
        loss = model(ids, targets=targets).item() / targets.numel()
    assert loss == pytest.approx(8.87, abs=0.04)
    assert loss == pytest.approx(math.log(6400), abs=0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rmsnorm_computes_in_float32(dtype):
    """Activations of size 1000, whose squares overflow float16, are normalised correctly; the
    result has the input's dtype.
    """
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data = torch.linspace(-2, 2, 64)
    y = norm(x)
    exact = x.double() / (x.double() ** 2).mean(-1, keepdim=True).sqrt() * norm.weight.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_rmsnorm_of_zeros_is_zero():
    """eps keeps a padded, all-zero state finite, and its size is the configured one."""
    assert (RMSNorm(8, 1e-5)(torch.zeros(2, 8)) == 0).all()
    small = torch.full((1, 8), 1e-3)
    assert RMSNorm(8, 1e-6)(small)[0, 0].item() == pytest.approx(1e-3 / math.sqrt(2e-6), rel=1e-4)


def turn(vector: list[float], position: int, theta: float) -> list[float]:
    """Rotary embedding by complex numbers: pair (j, j + D/2) is one number, turned by its angle."""
    half = len(vector) // 2
    pairs = [complex(vector[j], vector[j + half])
             * cmath.exp(1j * position * theta ** (-j / half)) for j in range(half)]
    return [z.real for z in pairs] + [z.imag for z in pairs]


def test_rotary_is_a_complex_rotation():
    """`rotate` equals multiplication by exp(i * position * theta^(-2j/D)), halves paired, also at
    the last of 32,768 positions.
    """
    positions = torch.tensor([[0, 1, 7, 32_767]])
    x = torch.randn(1, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    y = rotate(x, *rotary_table(positions, 16, 1e6))
    for head in range(3):
        for t, position in enumerate(positions[0].tolist()):
            expected = torch.tensor(turn(x[0, head, t].tolist(), position, 1e6))
            torch.testing.assert_close(y[0, head, t], expected, rtol=0, atol=5e-3)
            if position < 100:
                torch.testing.assert_close(y[0, head, t], expected, rtol=0, atol=1e-5)


def naive_attention(attention: Attention, x, doc_ids, position_ids, theta) -> torch.Tensor:
    """Softmax attention with loops over rows, heads and queries, in float64."""
    x, D = x.double(), attention.head_dim
    weight = {name: p.double() for name, p in attention.named_parameters()}
    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q, k, v = (row @ weight[f"{n}_proj.weight"].T for n in "qkv")
        heads = []
        for h in range(attention.n_heads):
            g = h * attention.n_kv_heads // attention.n_heads  # the key/value head it shares
            turned = [
                torch.tensor([turn(t.tolist(), int(p), theta)
                              for t, p in zip(m[:, i * D : (i + 1) * D], position_ids[b])])
                for m, i in ((q, h), (k, g))
            ]
            rows = []
            for t in range(len(row)):
                keys = [s for s in range(t + 1) if doc_ids[b, s] == doc_ids[b, t]]
                scores = turned[1].double()[keys] @ turned[0].double()[t] / math.sqrt(D)
                weights = scores.exp() / scores.exp().sum()
                rows.append(weights @ v[keys, g * D : (g + 1) * D])
            heads.append(torch.stack(rows))
        out[b] = torch.cat(heads, dim=-1) @ weight["o_proj.weight"].T
    return out


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attention_equals_naive_softmax(n_kv_heads):
    """Grouped-query attention inside documents equals loops over heads and queries; head h uses
    key/value head h // (H/K).
    """
    torch.manual_seed(0)
    attention = Attention(tiny_config(n_kv_heads=n_kv_heads)).eval()
    x = torch.randn(2, 9, 32)
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0] * 9])
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], list(range(9))])
    cos, sin = rotary_table(position_ids, 8, 1e6)
    with torch.no_grad():
        y = attention(x, cos, sin, Masked(attention_mask(doc_ids, doc_ids)), None)
        expected = naive_attention(attention, x, doc_ids, position_ids, 1e6)
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
        alone = attention(x[1:], cos[1:], sin[1:], Masked(None), None)
        torch.testing.assert_close(alone.double(), expected[1:], rtol=0, atol=2e-6)


def test_documents_in_a_row_do_not_see_each_other():
    """P2, A26: a document's logits in a packed row are those it has alone, whatever stands beside
    it, because attention stays inside and positions restart.
    """
    model = tiny_model()
    first, other, second, third = (random_ids(1, n) + k for k, n in enumerate((7, 7, 9, 1)))
    first, other, second, third = (ids % 50 for ids in (first, other, second, third))
    pads = torch.zeros(1, 3, dtype=torch.int64)
    doc_ids = torch.tensor([[0] * 7 + [1] * 9 + [2] + [PAD_DOC_ID] * 3])
    position_ids = torch.tensor([[*range(7), *range(9), 0, 0, 0, 0]])
    with torch.no_grad():
        packed, beside = (
            model(torch.cat((ids, second, third, pads), 1), position_ids, doc_ids)
            for ids in (first, other)
        )
        assert not torch.equal(first, other)
        torch.testing.assert_close(packed[:, :7], model(first), rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 7:16], model(second), rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 16:17], model(third), rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 7:17], beside[:, 7:17], rtol=0, atol=0)
        assert packed.isfinite().all()


def test_the_future_is_not_seen():
    """Changing a token changes no logits before it (and does change its own)."""
    model, ids = tiny_model(), random_ids(1, 12)
    changed = ids.clone()
    changed[0, 8] = (ids[0, 8] + 1) % 50
    with torch.no_grad():
        a, b = model(ids), model(changed)
    torch.testing.assert_close(a[:, :8], b[:, :8], rtol=0, atol=0)
    assert not torch.equal(a[:, 8], b[:, 8])


def test_loss_sums_over_supervised_targets_only():
    """P1, A20: with targets, forward gives the summed cross entropy; ignored positions add nothing
    to it nor to a gradient.
    """
    model = tiny_model()
    ids, targets = random_ids(2, 10), random_ids(2, 10).flip(1)
    targets[0, 4:] = IGNORED_TARGET
    logits = model(ids)
    loss = model(ids, targets=targets)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(reference_loss(logits.detach(), targets), rel=1e-5)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (model(ids[:1, :4], targets=targets[:1, :4]) + model(ids[1:], targets=targets[1:])).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_no_target_gives_zero_not_nan():
    """A20: rows without any supervised token have loss 0 and gradient 0, never NaN."""
    model, ids = tiny_model(), random_ids(2, 6)
    loss = model(ids, doc_ids=torch.full_like(ids, PAD_DOC_ID),
                 targets=torch.full_like(ids, IGNORED_TARGET))
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_dropout_acts_in_training_only():
    """`dropout` changes the training forward, each time anew, and leaves evaluation alone; 0 is
    off.
    """
    model, ids = tiny_model(dropout=0.3), random_ids(1, 8)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
        torch.testing.assert_close(model(ids), tiny_model()(ids), rtol=0, atol=0)
        model.train()
        assert not torch.equal(model(ids), model(ids))
        plain = tiny_model().train()
        assert torch.equal(plain(ids), plain(ids))


def test_every_parameter_learns():
    """No parameter is left out of the gradient, and the output is tied to the embedding."""
    model, ids = tiny_model(), random_ids(2, 10)
    model(ids, targets=ids.flip(1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    unused = next(i for i in range(50) if i not in ids.unique())
    assert model.model.embed_tokens.weight.grad[unused].abs().sum() > 0  # as an output


def test_constants_agree_across_folders():
    """`dataset/` may not import `model/`, so both state the two marks: they must be the same."""
    from dataset import packing

    assert (packing.IGNORED_TARGET, packing.PAD_DOC_ID) == (IGNORED_TARGET, PAD_DOC_ID)
