"""--start_layers: a model that begins with fewer blocks; and --optimizer muon, in whole runs."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from resume_checks import AGAIN, FLAGS, assert_same

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from model.weights import read_config, read_state
from trainer.common.schedule import depth

MUON = (*FLAGS, "--optimizer", "muon", "--n_layers", 4, "--start_layers", 1)


@pytest.mark.parametrize("n_layers, start, expected", [
    (8, 1, [1] * 5 + [2] * 3 + [4, 8]), (8, 4, [4] * 7 + [8] * 3), (8, 0, [8] * 10),
    (3, 1, [1] * 5 + [2] * 3 + [3] * 2), (6, 3, [3] * 7 + [6] * 3), (8, 8, [8] * 10),
])
def test_blocks_in_use(n_layers, start, expected):
    """Each number has the same compute, which is steps x (blocks + 1); the last step has all."""
    args = Namespace(n_layers=n_layers, start_layers=start)
    assert [depth(step, 10, args) for step in range(10)] == expected
    steps = [depth(step, 10_000, args) for step in range(10_000)]
    compute = [steps.count(blocks) * (blocks + 1) for blocks in set(steps)]
    assert max(compute) < 1.01 * min(compute) and steps[-1] == n_layers


def test_a_shallow_model_is_one_with_fewer_blocks():
    """Blocks beyond the depth take no part, in the loss and in the gradient."""
    torch.manual_seed(0)
    config = LMConfig(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=50)
    deep, shallow = MiniMindLM(config), MiniMindLM(replace(config, n_layers=2))
    deep.depth = 2
    shallow.load_state_dict(deep.state_dict(), strict=False)
    ids = torch.randint(50, (2, 9))
    for model in (deep, shallow):
        model(ids, targets=ids.roll(-1, 1)).backward()
    for name, parameter in shallow.named_parameters():
        assert parameter.grad.equal(deep.get_parameter(name).grad)
    for name, parameter in deep.named_parameters():
        assert (parameter.grad is None) == name.startswith(("model.layers.2", "model.layers.3"))


def test_new_blocks_hardly_change_what_is_there():
    """A trained stream is changed by some percent when blocks come in (a reason for the flag)."""
    torch.manual_seed(0)
    model = MiniMindLM(LMConfig(dim=64, n_layers=8, n_heads=4, n_kv_heads=2, vocab_size=50))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # as training makes it
    ids = torch.randint(50, (2, 30))
    with torch.no_grad():
        deep = model(ids)
        model.depth = 1
        shallow = model(ids)
    assert 0 < (deep - shallow).std() < 0.1 * shallow.std()


@pytest.mark.parametrize("instant, step", [
    ("in a micro-batch", 3), ("before a step", 4), ("after the update", 5), ("before a step", 13)])
def test_killed_and_resumed_while_it_grows(runs, data, instant, step):
    """P4 with Muon's momentum, whichever blocks have begun: 1, 2 and 4 of 14 steps."""
    flags = (*data, *MUON)
    assert runs.start(*flags, name="whole") == 0
    moments = runs.state("whole")["engine"]["optimizer"]
    assert set(moments["model.layers.3.mlp.up_proj.weight"]) == {"momentum"}
    assert "exp_avg_sq" in moments["model.embed_tokens.weight"]
    runs.killed(instant, step, *flags)
    assert runs.start(*flags, *AGAIN) == 0
    assert_same(runs.result(), runs.result("whole"))


@pytest.mark.parametrize("flag, value, was", [("optimizer", "adamw", "muon"),
                                              ("start_layers", 2, "1")])
def test_another_recipe_is_another_run(runs, data, capsys, flag, value, was):
    assert runs.start(*data, *MUON, "--max_steps", 2) == 0
    assert runs.start(*data, *MUON, "--max_steps", 2, f"--{flag}", value, *AGAIN) == 2
    assert f"--{flag} {value}: was {was}" in capsys.readouterr().err


def test_a_growing_run_keeps_its_length(runs, data, capsys):
    """More steps would put it back to fewer blocks: refused, and nothing is touched."""
    assert runs.start(*data, *MUON, "--max_steps", 3) == 0
    before = {path: path.read_bytes() for path in runs.out.iterdir()}
    assert runs.start(*data, *MUON, "--max_steps", 9, *AGAIN) == 2
    assert "a run of 3 steps, now 9" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in runs.out.iterdir()} == before
    assert runs.start(*data, *MUON, "--max_steps", 3, *AGAIN) == 0
    told = capsys.readouterr().out
    assert "the run is finished" in told and "More --epochs" not in told


def test_weights_of_a_growing_run_are_what_has_been_trained(runs, data):
    """Saved in the middle: a model of the blocks in use, whose validation is that of the file."""
    flags = (*data, *MUON, "--save_interval", 2)
    runs.killed("before a step", 5, *flags)  # 14 steps: 1 block until step 6
    weights = read_state(runs.path(".pth"))
    assert {name.split(".")[2] for name in weights if "layers" in name} == {"0"}
    config, about = read_config(runs.path(".pth"), weights)
    assert config.n_layers == 1 and about["step"] == 4
    assert runs.start(*flags, *AGAIN) == 0
    assert read_config(runs.path(".pth"), read_state(runs.path(".pth")))[0].n_layers == 4
    rows = [row["depth"] for row in runs.rows() if "depth" in row]
    assert rows[0] == 1 and rows[-1] == 4 and rows == sorted(rows)


def test_auto_goes_on_with_the_optimizer_of_the_run(runs, data, capsys):
    """--optimizer auto is muon in a new run, and whatever the run has in a resumed one."""
    flags = (*data, *FLAGS, "--max_steps", 2)
    assert runs.start(*flags, "--optimizer", "auto") == 0
    assert runs.state()["arguments"]["optimizer"] == "muon"
    assert runs.start(*flags, "--optimizer", "adamw") == 0
    assert runs.start(*flags, "--optimizer", "auto", "--max_steps", 3, *AGAIN) == 0
    assert runs.state()["arguments"]["optimizer"] == "adamw"
    capsys.readouterr()


@pytest.mark.parametrize("flags, told", [
    (("--optimizer", "muon", "--shard", "full"), "--optimizer muon with --deepspeed or --shard"),
    (("--start_layers", 1, "--shard", "full"), "--start_layers with --deepspeed or --shard full"),
    (("--start_layers", 3), "--start_layers 3: expected at most --n_layers 2"),
    (("--start_layers", -1), "--start_layers -1: expected at least 0"),
    (("--start_layers", 1, "--from_weight", "pretrain"), "--start_layers with --from_weight"),
])
def test_what_does_not_go_together(runs, data, capsys, flags, told):
    assert runs.start(*data, *flags) == 2
    assert told in capsys.readouterr().err


def test_a_run_with_muon_does_not_go_on_in_parts(runs, data, capsys):
    """Found in the state, not in the flags: refused with what to do."""
    assert runs.start(*data, *FLAGS, "--optimizer", "muon", "--max_steps", 2) == 0
    assert runs.start(*data, *FLAGS, "--optimizer", "auto", "--shard", "full", *AGAIN) == 2
    assert "needs whole matrices" in capsys.readouterr().err
