"""The sum of gradients: what is sent, in which order and when, with the other processes played."""

from types import SimpleNamespace

import pytest
import torch

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from trainer.common import reducer
from trainer.common.reducer import Reducer

CONFIG = LMConfig(dim=16, n_layers=3, n_heads=2, n_kv_heads=1, vocab_size=32)


@pytest.fixture
def sent(monkeypatch):
    """Tensors sent so far. The one other process always has the same gradients as this one."""
    sent = []

    def all_reduce(tensor, async_op):
        assert async_op, "the backward is not to wait"
        sent.append(tensor)
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(reducer.torch_dist, "all_reduce", all_reduce)
    monkeypatch.setattr(reducer.torch_dist, "broadcast", lambda tensor, src: None)
    return sent


@pytest.fixture
def model(sent):
    torch.manual_seed(0)
    return MiniMindLM(CONFIG)


def loss_of(model):
    ids = torch.arange(12).view(2, 6)
    return model(ids, targets=ids.roll(-1, 1))


def test_all_begin_with_the_weights_of_rank_0(model, monkeypatch):
    of_rank = [3.0, 4.0]
    monkeypatch.setattr(reducer.torch_dist, "broadcast",
                        lambda tensor, src: tensor.fill_(of_rank[src]))
    Reducer(model)
    assert all((parameter == 3).all() for parameter in model.parameters())


def test_gradients_leave_while_the_backward_is_at_work(model, sent):
    """Last block first, each parameter once; when the backward comes to the first block the
    gradients of those after it are on their way. Earlier micro-batches send nothing.
    """
    sums = Reducer(model)
    loss_of(model).backward()
    assert sent == []
    on_their_way = []
    model.model.layers[0].register_full_backward_pre_hook(
        lambda *_: on_their_way.append(len(sent)))
    single = [parameter.grad.clone() for parameter in model.parameters()]
    with sums.summing():
        loss_of(model).backward()
    parts = [len(list(block.parameters())) for block in model.model.layers]
    assert on_their_way == [1 + sum(parts[1:])]  # and the last norm
    expected = [parameter.grad for parameter in reversed(list(model.parameters()))]
    assert [id(tensor) for tensor in sent] == [id(gradient) for gradient in expected]
    for parameter, gradient in zip(model.parameters(), single, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * 2 * gradient)  # micro-batches, processes


def test_blocks_that_are_not_in_use_send_nothing(model, sent):
    sums = Reducer(model)
    model.depth = 2
    with sums.summing():
        loss_of(model).backward()
    assert sum(tensor.numel() for tensor in sent) == sum(
        parameter.numel() for parameter in model.parameters_in_use()) < model.num_parameters()
    assert all(parameter.grad is None for parameter in model.model.layers[2].parameters())


def test_a_parameter_without_a_gradient_counts_as_zeros(model, sent):
    """An idea that somebody tries: nobody waits for what one process does not use."""
    unused = model.extra = torch.nn.Parameter(torch.ones(5))
    with Reducer(model).summing():
        loss_of(model).backward()
    assert len(sent) == len(list(model.parameters())) and (unused.grad == 0).all()


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_the_rest_is_answered(model, sent, when):
    """Whenever a process gives up, in sum it has sent what the others send, in their order; the
    next step is a new one.
    """
    sums = Reducer(model)
    loss = loss_of(model)

    def out_of_memory(*_):
        if when == "within":
            raise MemoryError

    handle = model.model.layers[0].register_full_backward_hook(out_of_memory)
    try:
        if when != "before":
            with sums.summing():
                loss_of(model).backward()
    except MemoryError:
        assert 0 < len(sent) < len(list(model.parameters()))
    handle.remove()
    sums.abandon()
    expected = [parameter.numel() for parameter in reversed(list(model.parameters()))]
    assert [tensor.numel() for tensor in sent] == expected
    sums.reset()
    sent.clear()
    with sums.summing():
        loss.backward()
    assert [tensor.numel() for tensor in sent] == expected


def test_a_call_that_fails_is_made_again(model, sent, monkeypatch):
    """Memory may run out in the very call that sends a gradient."""
    all_reduce = reducer.torch_dist.all_reduce

    def third_fails(tensor, async_op):
        if len(sent) == 2 and not failed:
            failed.append(True)
            raise MemoryError
        return all_reduce(tensor, async_op=async_op)

    failed = []
    monkeypatch.setattr(reducer.torch_dist, "all_reduce", third_fails)
    sums = Reducer(model)
    with pytest.raises(MemoryError), sums.summing():
        loss_of(model).backward()
    sums.abandon()
    assert len(sent) == len(list(model.parameters()))
