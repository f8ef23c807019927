"""The stress script, for a few kills, and that it would notice what it is there to notice."""

import os
import re

import pytest
import torch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")


@pytest.mark.slow
def test_a_few_kills(run_script):
    """P4, P5: `kill -9` at random instants costs few steps and changes no bit of the result."""
    done = run_script("scripts/stress_resume.py", "--kills", 8, "--seed", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    tally = dict(re.findall(r"^(\D+?) +(\d+)$", done.stdout, re.MULTILINE))
    assert tally["kills"] == tally["states valid"] == "8" and int(tally["during a save"]) >= 3
    assert tally["runs completed"] == tally["runs completed, equal to the bit"] != "0"
    assert tally["not as promised"] == "0"


def events(*told):
    from scripts.killable_run import KILLED, Launch

    return Launch([(kind, str(value)) for kind, value in told], KILLED)


def test_the_bound_on_repeated_steps():
    """P5: save_interval, plus the steps run while the newest state was being written."""
    from scripts.stress_resume import SAVE_INTERVAL, allowed_repeats

    steps = [("step", 99), ("step", 100)]
    assert allowed_repeats(events(*steps), 90) == SAVE_INTERVAL
    assert allowed_repeats(events(*steps, ("save", 100), ("step", 101), ("step", 103)),
                           60) == SAVE_INTERVAL + 3
    assert allowed_repeats(events(*steps, ("save", 100), ("step", 103), ("saved", 100)),
                           100) == SAVE_INTERVAL
    assert allowed_repeats(events(*steps, ("save", 100), ("step", 170), ("saved", 100)),
                           100) == 72  # a save longer than the interval: the next one waits for it


def test_any_difference_is_found():
    """Two results are equal only if every number is, in every tensor and every row."""
    from scripts.stress_resume import differences

    def result():
        return {"rows": [{"step": 1, "loss": 2.5}], "state": {"w": torch.ones(3), "seconds": 1.0}}

    other = result()
    other["state"]["seconds"] = 7.0
    assert differences(other, result(), "r") == []
    other["state"]["w"][1] = 1.0000001
    assert differences(other, result(), "r") == ["r.state.w"]
    other["rows"][0]["loss"] = 2.4999999
    assert differences(other, result(), "r") == ["r.rows.0.loss", "r.state.w"]
    other["rows"].append({"step": 1, "loss": 2.5})
    assert differences(other, result(), "r") == ["r.rows", "r.state.w"]
