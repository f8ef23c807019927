"""DeepSpeed: the curve, the files and the manners of the plain engine, under ZeRO 1, 2 and 3.

`bash scripts/test.sh --all` installs it (requirements-deepspeed.txt) and runs these.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, texts
from processes import free_port, launch_all
from test_distributed import NUM_TEXTS, STEPS, flags_of, write

if importlib.util.find_spec("deepspeed") is None:  # importing it here would take seconds
    pytest.skip("needs pip install -r requirements-deepspeed.txt", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deepspeed")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every forked launch of this file."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "data.jsonl", texts(NUM_TEXTS))
    write(folder / "val.jsonl", texts(20, seed=1))
    zero = {stage: folder / f"zero{stage}.json" for stage in (1, 2, 3)}
    for stage, path in zero.items():
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    launches = {"one": {"flags": flags_of(folder)}}
    for stage in (1, 2, 3):
        launches[f"zero{stage}"] = {"processes": 2, "hooks": ["watch"],
                                    "flags": flags_of(folder, 2, deepspeed=zero[stage])}
        launches[f"nan {stage}"] = {"processes": 2, "hooks": ["nan"], "flags": flags_of(
            folder, 2, deepspeed=zero[stage], max_steps=5)}
        launches[f"float16 {stage}"] = {
            "processes": 2, "hooks": ["overflow", "autocast_as_on_a_gpu"], "flags": flags_of(
                folder, 2, deepspeed=zero[stage], dtype="float16", max_steps=6)}
    launches["float16"] = {"processes": 2, "hooks": ["overflow"],
                           "flags": flags_of(folder, 2, dtype="float16", max_steps=6)}
    launches["single"] = {"flags": flags_of(folder, deepspeed=zero[2], max_steps=10)}
    launches["single plain"] = {"flags": flags_of(folder, max_steps=10)}
    for number, (processes, engine) in enumerate((
            (1, {}), (2, {}), (2, {"deepspeed": zero[2]}), (2, {"shard": "full"}),
            (2, {"deepspeed": zero[3]}), (1, {"deepspeed": zero[1]}), (1, {}))):
        launches[f"chain {number}"] = {
            "processes": processes, "out": "chain", "hooks": ["die"] * (number < 6),
            "environment": {"DIE_AT": 8 * (number + 1)},
            "flags": flags_of(folder, processes, save_interval=4, from_resume=1, **engine)}
    return launch_all(folder, launches)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_the_curve_of_one_process(runs, stage):
    """P1: losses of 50 steps to 1e-4, gradient norms and weights; the state names and holds what
    the plain engine's does, and the weights are the plain file.
    """
    one, zero = runs["one"], runs[f"zero{stage}"]
    assert zero.codes == [0, 0], zero.told
    assert [seen["engine"] for seen in zero.seen] == [f"DeepSpeedEngine{stage}"] * 2
    assert len(zero.losses) == STEPS and zero.losses == pytest.approx(one.losses, rel=1e-4)
    assert zero.validations == pytest.approx(one.validations, rel=1e-4)
    assert [row["grad_norm"] for row in zero.log] == pytest.approx(
        [row["grad_norm"] for row in one.log], rel=1e-3)
    torch.testing.assert_close(zero.weights, one.weights, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(zero.state["engine"]["optimizer"],
                               one.state["engine"]["optimizer"], rtol=1e-2, atol=1e-5)
    saved = torch.load(zero.out / "run_32.pth", weights_only=True)
    assert saved.keys() == torch.load(one.out / "run_32.pth", weights_only=True).keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, zero.weights[name].half()), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bad_number_is_left_out(runs, stage):
    """A11: a NaN loss on one process costs all of them that step, and no weight."""
    run = runs[f"nan {stage}"]
    assert run.codes == [0, 0], run.told
    assert [row["skipped_steps"] for row in run.log] == [0, 0, 1, 1, 1]
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float16_backs_off(runs, stage):
    """An overflow halves the scale once and costs one step, as in the plain engine. Products are in
    float16, though DeepSpeed would turn the autocast of a GPU off.
    """
    plain, run = runs["float16"], runs[f"float16 {stage}"]
    assert run.codes == [0, 0], run.told
    assert [seen["dtypes"] for seen in run.seen] == [["torch.float16"]] * 2
    assert [row["skipped_steps"] for row in run.log] == [0, 0, 1, 1, 1, 1]
    assert run.losses == pytest.approx(plain.losses, rel=1e-3)
    assert run.state["engine"]["scaler"] == plain.state["engine"]["scaler"]
    assert run.state["engine"]["scaler"]["scale"] == 2.0**15


def test_a_single_process(runs):
    """--deepspeed without a launcher, as on one card."""
    assert runs["single"].codes == [0], runs["single"].told
    assert runs["single"].losses == pytest.approx(runs["single plain"].losses, rel=1e-4)


def test_a_run_goes_through_many_engines(runs):
    """P4: one process, killed, two of DDP, killed, ZeRO 2, killed, FSDP2, killed, ZeRO 3, killed,
    ZeRO 1 on one process, killed, the plain engine: it ends where the uninterrupted run ends.
    """
    for number in range(7):
        run = runs[f"chain {number}"]
        assert set(run.codes) == ({-9} if number < 6 else {0}), run.told
        if number:
            step = int(re.search(r"resuming after step (\d+)", run.told)[1])
            assert step in (8 * number, 8 * number - 4)
    one, last = runs["one"], runs["chain 6"]
    assert [row["step"] for row in last.log] == list(range(1, STEPS + 1))
    assert last.losses == pytest.approx(one.losses, rel=1e-5)
    torch.testing.assert_close(last.weights, one.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", [["--deepspeed", "ds_config.json"], []])
def test_the_deepspeed_launcher(tmp_path, engine):
    """A67: the documented line, with DeepSpeed's engine and, without --deepspeed, with DDP."""
    write(tmp_path / "data.jsonl", texts(60))
    write(tmp_path / "val.jsonl", texts(20, seed=1))
    command = [Path(sys.executable).parent / "deepspeed", f"--master_port={free_port()}",
               "--num_gpus=2", "train_pretrain.py", *flags_of(tmp_path, 2, max_steps=3),
               "--out_dir", tmp_path / "out", *engine]
    result = subprocess.run([str(part) for part in command], cwd=ROOT / "trainer", text=True,
                            capture_output=True, timeout=200, env={**os.environ,
                            "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    told = result.stdout + result.stderr
    assert result.returncode == 0, told
    assert "world_size 2 | cpu" in told and "step 3/3" in told
    assert (tmp_path / "out" / "run_32.pth").is_file()
