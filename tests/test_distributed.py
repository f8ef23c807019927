"""Several processes are one: the same losses, weights, rows and files as a single process.

Promises P1, P3 and P4 over processes; cases A06, A41, A69 and A72.
"""

import json
import re

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, texts
from processes import launch_all

from trainer.common.distributed import ProcessError, start_distributed

# One group, so that the launches are made once; they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

STEPS = 50
NUM_TEXTS = 132  # 91 rows: steps of 12 and one of 7, so 4 and 3; 3, 2 and 2; 2, 2, 2 and 1
CUTS = {1: (3, 4), 2: (3, 2), 3: (2, 2), 4: (3, 1)}  # batch_size, accumulation_steps: 12 rows


def chats(count):
    return [{"conversations": [{"role": "user", "content": f"{number}?"},
                               {"role": "assistant", "content": "fox " * (1 + number % 25)}]}
            for number in range(count)]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def flags_of(folder, processes=1, data="data.jsonl", **others):
    """Flags of a run whose steps are of 12 rows, however many processes there are."""
    batch_size, accumulation_steps = CUTS[processes]
    flags = [*TINY_RUN, "--save_weight", "run", "--data_path", folder / data, "--cache_dir",
             folder / "cache", "--epochs", 9, "--max_steps", STEPS, "--learning_rate", 1e-3,
             "--val_data_path", folder / "val.jsonl", "--eval_interval", 25,
             "--batch_size", batch_size, "--accumulation_steps", accumulation_steps]
    for name, value in others.items():
        flags += [f"--{name}", value]
    return flags


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every launch of this file; the first one, of three processes, finds no token cache."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "data.jsonl", texts(NUM_TEXTS))
    write(folder / "tail.jsonl", texts(124))  # 85 rows: seven steps of 12 and one of 1
    write(folder / "val.jsonl", texts(20, seed=1))
    write(folder / "chats.jsonl", chats(24))
    write(folder / "bad.jsonl", [{"text": "good"}, {"text": 5}])
    launches = {}
    for processes in (3, 1, 2, 4):
        launches[f"ddp{processes}"] = {"processes": processes, "hooks": ["watch"] * (processes < 4),
                                       "flags": flags_of(folder, processes)}
    for processes in (1, 3):
        launches[f"tail{processes}"] = {
            "processes": processes, "hooks": ["watch"],
            "flags": flags_of(folder, processes, "tail.jsonl", max_steps=10)}
    launches["full2"] = {"processes": 2, "hooks": ["watch"],
                         "flags": flags_of(folder, 2, shard="full")}
    for processes in (1, 2):
        flags = flags_of(folder, processes, "chats.jsonl", from_weight="none", max_steps=8,
                         val_data_path=folder / "chats.jsonl")
        launches[f"sft{processes}"] = {"processes": processes, "flags": flags,
                                       "script": "train_full_sft", "hooks": ["unsupervised"]}
        launches[f"bfloat16 {processes}"] = {
            "processes": processes,
            "flags": flags_of(folder, processes, dtype="bfloat16", max_steps=10)}
        launches[f"float16 {processes}"] = {
            "processes": processes, "hooks": ["overflow"],
            "flags": flags_of(folder, processes, dtype="float16", max_steps=6)}
        launches[f"grow{processes}"] = {
            "processes": processes, "flags": flags_of(folder, processes, optimizer="muon",
                                                      n_layers=4, start_layers=1, max_steps=20)}
    for dtype in ("bfloat16", "float16"):
        launches[f"{dtype} full"] = {
            "processes": 2, "hooks": ["overflow"] * (dtype == "float16"),
            "flags": flags_of(folder, 2, dtype=dtype, shard="full",
                              max_steps=10 if dtype == "bfloat16" else 6)}
    for shard in ("none", "full"):
        launches[f"nan {shard}"] = {"processes": 2, "hooks": ["nan"],
                                    "flags": flags_of(folder, 2, shard=shard, max_steps=5)}
    for number, (processes, shard) in enumerate(((1, "none"), (3, "none"), (2, "full"),
                                                 (1, "none"))):
        launches[f"chain {number}"] = {
            "processes": processes, "out": "chain", "hooks": ["die"] * (number < 3),
            "environment": {"DIE_AT": 12 * (number + 1)},
            "flags": flags_of(folder, processes, shard=shard, save_interval=5, from_resume=1,
                              accumulation_steps=CUTS[processes][1] + number)}
    launches["limit"] = {"processes": 2, "flags": flags_of(
        folder, 2, max_minutes=0.02, max_steps=0, epochs=9999)}
    launches["bad data"] = {"processes": 3, "hooks": ["late"],
                            "flags": flags_of(folder, 3, "bad.jsonl")}
    launches["bad flags"] = {"processes": 2, "flags": flags_of(folder, 2, seed=-1, dropout=2)}
    launches["lost"] = {"processes": 3, "hooks": ["die"], "timeout": 90,
                        "environment": {"DIE_AT": 12, "DIE_RANK": 1},
                        "flags": flags_of(folder, 3, save_interval=5)}
    launches["found"] = {"processes": 2, "out": "lost", "flags": flags_of(folder, 2, from_resume=1)}
    launches["alone"] = {"hooks": ["impatient"], "environment": {"WORLD_SIZE": 3},
                         "flags": flags_of(folder)}
    launches["calls"] = {"processes": 3, "script": "test_distributed"}
    return launch_all(folder, launches)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_the_curve_is_that_of_one_process(runs, processes):
    """P1: losses to 1e-5 over 50 steps with short last ones in between, gradients, weights."""
    one, several = runs["ddp1"], runs[f"ddp{processes}"]
    assert several.codes == [0] * processes, several.told
    assert len(one.losses) == STEPS
    tokens = np.diff([0] + [row["tokens"] for row in one.log])
    assert tokens.min() < tokens.max() * 0.7, "there was to be a short step"
    assert several.losses == pytest.approx(one.losses, rel=1e-5)
    assert several.validations == pytest.approx(one.validations, rel=1e-5)
    assert [row["tokens"] for row in several.log] == [row["tokens"] for row in one.log]
    assert [row["epoch"] for row in several.log] == [row["epoch"] for row in one.log]
    assert [r["grad_norm"] for r in several.log] == pytest.approx(
        [r["grad_norm"] for r in one.log], rel=1e-4)
    assert one.losses[-1] < one.losses[0] - 1, "it was to learn"
    torch.testing.assert_close(several.weights, one.weights, rtol=1e-4, atol=1e-5)


def test_a_growing_model_grows_alike(runs):
    """P1 with Muon, and with blocks that have no gradient yet in the first steps."""
    one, two = runs["grow1"], runs["grow2"]
    assert two.codes == [0, 0], two.told
    assert len(one.losses) == 20 and one.losses[-1] < one.losses[0] - 1
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["ddp2", "ddp3", "tail3"])
def test_each_row_is_seen_once_and_all_work_alike(runs, name):
    """A41, A72: together the processes read what one would; each runs as many forwards, also where
    a step's rows do not go round, or leave all but one process without any.
    """
    assert set(runs[name].codes) == {0}, runs[name].told
    one, several = runs[f"{name[:-1]}1"], runs[name]
    assert several.losses == pytest.approx(one.losses, rel=1e-5)
    one, several = one.seen, several.seen
    rows = [row for seen in several for row in seen["rows"]]
    assert sorted(row for row in rows if row != -1) == sorted(one[0]["rows"])
    assert rows.count(-1) > 0, "a share was to be shorter"
    assert len({seen["forwards"] for seen in several}) == 1


@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_are_reduced_once_a_step(runs, processes):
    """A06: one round of reductions a step, of every parameter once, whatever the accumulation."""
    parameters = sum(tensor.numel() for tensor in runs["ddp1"].weights.values())
    for seen in runs[f"ddp{processes}"].seen:
        assert seen["forwards"] > 1.5 * STEPS, "steps were to have several micro-batches"
        assert seen["reductions"] == STEPS
        assert seen["reduced_numbers"] == STEPS * parameters


def test_one_process_tokenises(runs):
    """A69: of three that start with an empty cache one builds each; the others find it."""
    assert sum(seen["builds"] for seen in runs["ddp3"].seen) == 2  # training and validation


def test_a_share_without_a_supervised_token(runs):
    """A72: rows without a target, on one process or on both, change neither count nor curve."""
    one, two = runs["sft1"], runs["sft2"]
    assert two.codes == [0, 0], two.told
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-4, atol=1e-5)


def test_sharded_matrices_change_nothing(runs):
    """`--shard full` (FSDP2): losses and weights of one process, and the same plain file."""
    one, full = runs["ddp1"], runs["full2"]
    assert full.codes == [0, 0], full.told
    assert [seen["engine"] for seen in full.seen] == ["ShardedEngine"] * 2
    assert full.losses == pytest.approx(one.losses, rel=1e-5)
    assert full.validations == pytest.approx(one.validations, rel=1e-5)
    torch.testing.assert_close(full.weights, one.weights, rtol=1e-4, atol=1e-5)
    assert full.state["engine"]["optimizer"].keys() == one.state["engine"]["optimizer"].keys()
    saved = torch.load(full.out / "run_32.pth", weights_only=True)
    for name, tensor in saved.items():
        assert type(tensor) is torch.Tensor and tensor.dtype == torch.float16
        assert torch.equal(tensor, full.weights[name].half()), name


@pytest.mark.parametrize("name", ["bfloat16 2", "bfloat16 full"])
def test_bfloat16_is_close(runs, name):
    """In bfloat16 the rounding differs with the cut: 1 % of the loss over 10 steps."""
    assert runs[name].codes == [0, 0], runs[name].told
    assert runs[name].losses == pytest.approx(runs["bfloat16 1"].losses, rel=0.01)


@pytest.mark.parametrize("name", ["float16 1", "float16 2", "float16 full"])
def test_float16_backs_off_on_all_processes(runs, name):
    """One process's gradient overflows: all leave the step out, and all halve the scale once."""
    run = runs[name]
    assert set(run.codes) == {0}, run.told
    assert [row["skipped_steps"] for row in run.log] == [0, 0, 1, 1, 1, 1]
    assert run.losses == pytest.approx(runs["float16 1"].losses, rel=0.02)
    assert run.state["engine"]["scaler"]["scale"] == 2.0**15


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_bad_number_of_one_process_is_left_out_by_all(runs, shard):
    """A11: a NaN loss on one process costs all of them that step, and no weight."""
    run = runs[f"nan {shard}"]
    assert run.codes == [0, 0], run.told
    assert [row["skipped_steps"] for row in run.log] == [0, 0, 1, 1, 1]
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


def test_a_run_goes_through_many_hands(runs):
    """P4, A41: 1 process, killed, 3, killed, 2 with FSDP2, killed, 1 again, which ends where the
    uninterrupted run ends; each takes up the step after the newest save.
    """
    assert [runs[f"chain {number}"].codes for number in range(4)] == [[-9], [-9] * 3, [-9] * 2, [0]]
    for number, before, now in ((1, 1, 3), (2, 3, 2), (3, 2, 1)):
        assert f"processes: {before} -> {now}" in runs[f"chain {number}"].told
        step = re.search(r"resuming after step (\d+)", runs[f"chain {number}"].told)[1]
        assert int(step) in (12 * number // 5 * 5, 12 * number // 5 * 5 - 5)
    one, last = runs["ddp1"], runs["chain 3"]
    assert [row["step"] for row in last.log] == list(range(1, STEPS + 1))
    assert last.losses == pytest.approx(one.losses, rel=1e-5)
    torch.testing.assert_close(last.weights, one.weights, rtol=1e-4, atol=1e-5)


def test_a_time_limit_is_no_failure(runs):
    """--max_minutes: the processes agree on a last step, save it, and end with 0."""
    run = runs["limit"]
    assert run.codes == [0, 0], run.told
    assert "stopped by --max_minutes" in run.told
    assert run.state["step"] == run.log[-1]["step"] < run.state["total_steps"]


def test_an_error_is_said_once(runs):
    """A fault that all meet, in the data or the flags, is printed by one of them; all end with 2.
    """
    assert runs["bad data"].codes == [2, 2, 2]
    assert runs["bad data"].stderr.count("bad.jsonl:2:") == 1, runs["bad data"].stderr
    assert runs["bad flags"].codes == [2, 2]
    for word in ("--seed -1", "dropout=2"):
        assert runs["bad flags"].stderr.count(word) == 1, runs["bad flags"].stderr


def test_a_lost_process_ends_the_others(runs):
    """SIGKILL of one: the others notice without a launcher's help, within 60 s, say so once, and
    the run goes on from its last save with another number of processes.
    """
    lost, found = runs["lost"], runs["found"]
    assert lost.codes == [1, -9, 1] and lost.seconds < 60
    assert lost.stderr.count("another process of this run was lost") == 1, lost.stderr
    assert "Traceback" not in lost.stderr
    assert found.codes == [0, 0] and "processes: 3 -> 2" in found.told
    assert found.losses == pytest.approx(runs["ddp1"].losses, rel=1e-5)


def test_processes_that_do_not_come_are_waited_for_briefly(runs):
    """A66: RANK=0 WORLD_SIZE=3 by hand ends with advice instead of hanging."""
    run = runs["alone"]
    assert run.codes == [2] and "Traceback" not in run.stderr
    for word in ("rank 0 of 3", "localhost:", "address", "port", "GLOO_SOCKET_IFNAME"):
        assert word in run.stderr, run.stderr


def main():
    """Every call of `Dist`, in one of three processes (the launch named "calls")."""
    dist = start_distributed("cpu")
    rank, exact = dist.rank, 2**53 - 3
    assert (dist.world_size, dist.is_main) == (3, rank == 0)
    assert dist.sum(rank, 0.5) == [3, 1.5] and dist.sum(exact * (rank == 2)) == [exact]
    assert isinstance(dist.sum(rank)[0], int)
    assert dist.max(rank, -rank, rank == 1) == [2, 0, True]
    assert dist.add_up(torch.tensor([1.0, rank])).tolist() == [3.0, 3.0]
    assert dist.gather({"rank": rank}) == [{"rank": other} for other in range(3)]
    called = []
    assert dist.from_main(lambda: called.append(1) or f"said by {rank}") == "said by 0"
    assert len(called) == (rank == 0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        dist.from_main(lambda: open("nowhere"))
    dist.agree("colour", "red")
    with pytest.raises(ProcessError, match=r"same taste: rank 0: 0; rank 1: 0; rank 2: 1"):
        dist.agree("taste", str(rank // 2))
    print("only the main process prints")
    dist.finish()


def test_what_processes_tell_each_other(runs):
    """Sums (exact), maxima, gathering, the main process's word and its errors, agreement."""
    run = runs["calls"]
    assert run.codes == [0, 0, 0], run.told
    assert [text.count("only the main process prints") for text in run.stdout] == [1, 0, 0]
