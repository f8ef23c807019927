"""Runs under real launchers: torchrun with one agent or two, its signals, losses and restarts,
machines that come and go."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, texts
from processes import free_port

pytestmark = pytest.mark.xdist_group("processes")
AGENT = [sys.executable, "-m", "torch.distributed.run"]
ONE_HOST = [*AGENT, "--standalone"]  # it finds a free port by itself


class Job:
    """A training under a launcher, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.number = folder, folder / "out", 0
        (folder / "data.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in texts(90)))
        self.metrics = self.out / "run_32_metrics.jsonl"
        self.agents = []

    def flags(self, *others):
        return [str(flag) for flag in (
            *TINY_RUN, "--save_weight=run", "--data_path", self.folder / "data.jsonl",
            "--cache_dir", self.folder / "cache", "--out_dir", self.out, "--batch_size=3",
            "--save_interval=5", *others)]

    def start(self, launcher, *flags):
        """The launcher, running; its output goes to its `.told`."""
        path = self.folder / f"{len(self.agents)}.txt"
        with open(path, "w") as file:
            agent = subprocess.Popen(
                [*launcher, "train_pretrain.py", *self.flags(*flags)], cwd=ROOT / "trainer",
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"})
        agent.told = path.read_text
        self.agents.append(agent)
        return agent

    def steps(self):
        """The steps that were logged."""
        if not self.metrics.exists():
            return []
        whole = [line for line in self.metrics.read_text().splitlines(True) if line.endswith("\n")]
        return [row["step"] for row in map(json.loads, whole) if "loss" in row]

    def wait_for_step(self, step, agent):
        end = time.monotonic() + 120
        while not any(done >= step for done in self.steps()[-1:]):
            assert agent.poll() is None and time.monotonic() < end, agent.told()
            time.sleep(0.05)

    def go_on(self, launcher=(sys.executable,), *flags):
        """Resumes the run for a second or so; returns what was printed."""
        agent = self.start(launcher, "--accumulation_steps=4", "--epochs=999", "--from_resume=1",
                           "--max_minutes=0.03", *flags)
        assert agent.wait(120) == 0, agent.told()
        assert self.steps() == list(range(1, self.steps()[-1] + 1)), "no gap, no double row"
        return agent.told()

    def wait_for_resuming(self, change):
        """Waits until the run goes on with other processes; returns after which step."""
        end = time.monotonic() + 120
        pattern = rf"processes: {change}\n(?:a step keeps .*\n)?resuming after step (\d+)"
        while not (found := re.search(pattern, self.told)):
            assert time.monotonic() < end, self.told
            time.sleep(0.1)
        return int(found[1])

    @property
    def told(self):
        return "".join(agent.told() for agent in self.agents)

    def kill(self, agent):
        """SIGKILL for an agent and its processes, as when a machine is lost."""
        if agent.poll() is None:
            for process in (agent.pid, *children(agent.pid)):  # each is in a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def clean_up(self):
        for agent in self.agents:
            self.kill(agent)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.clean_up()


def children(pid):
    """The processes that a process started, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.slow
def test_torchrun_and_a_request_to_end(job):
    """A60: the documented line with two processes, on a CPU. SIGTERM to torchrun: both agree on a
    last step and save it, torchrun ends with an error, and one process goes on after that step.
    """
    agent = job.start([*ONE_HOST, "--nproc_per_node=2"], "--accumulation_steps=2", "--epochs=999")
    job.wait_for_step(7, agent)
    agent.terminate()
    assert agent.wait(60) != 0
    told = agent.told()
    assert "world_size 2 | cpu" in told and told.count("SIGTERM: saving after this step") == 1, told
    assert told.count("stopped by SIGTERM; to go on: torchrun --nproc_per_node 2") == 1, told
    last = job.steps()[-1]
    assert f"resuming after step {last} from" in job.go_on()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_a_killed_process_ends_the_run(job):
    """SIGKILL of one process: torchrun and the rest end within 60 s, with an error, and the run
    goes on from its last save.
    """
    agent = job.start([*ONE_HOST, "--nproc_per_node=2"], "--accumulation_steps=8", "--epochs=999")
    job.wait_for_step(12, agent)
    processes = children(agent.pid)
    assert len(processes) == 2
    os.kill(processes[-1], signal.SIGKILL)
    assert agent.wait(60) != 0
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    logged = job.steps()[-1]
    told = job.go_on([*ONE_HOST, "--nproc_per_node=2"], "--accumulation_steps=8")
    step = int(told.split("resuming after step ")[1].split()[0])
    assert step % 5 == 0 and logged - 10 <= step <= logged


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_restarted_processes_resume(job):
    """--max_restarts 1: after a process is lost all are started again, and go on from the last
    save though nobody said --from_resume; the run ends well, every step logged once.
    """
    agent = job.start([*ONE_HOST, "--nproc_per_node=2", "--max_restarts=1"],
                      "--accumulation_steps=2", "--epochs=999", "--max_steps=300")
    job.wait_for_step(12, agent)
    os.kill(children(agent.pid)[-1], signal.SIGKILL)
    assert agent.wait(120) == 0, agent.told()
    assert agent.told().count("resuming after step") == 1
    assert job.steps() == list(range(1, 301))
    assert not list(job.out.glob("*.old*"))


@pytest.mark.slow
def test_two_machines(job):
    """A66: two torchrun agents that meet at an address, each with two of the four processes, as on
    two machines; one of all prints and writes.
    """
    port = free_port()
    agents = [job.start([*AGENT, "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=2",
                         "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"],
                        "--accumulation_steps=1", "--epochs=999", "--max_steps=12")
              for node in range(2)]
    assert [agent.wait(150) for agent in agents] == [0, 0], [agent.told() for agent in agents]
    told = "".join(agent.told() for agent in agents)
    assert told.count("world_size 4 | cpu") == told.count("step 12/12") == 1
    assert job.steps() == list(range(1, 13))
    assert (job.out / "run_32.pth").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_restart_on_account_of_another_machine_resumes(job, lost):
    """Two agents, and the process of one is lost: torchrun counts a restart only there, but both
    go on from the last save, whichever of them is rank 0.
    """
    port = free_port()
    agents = [job.start([*AGENT, "--nnodes=2", "--nproc_per_node=1", "--max_restarts=1",
                         "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"],
                        "--accumulation_steps=2", "--epochs=999", "--max_steps=200")
              for _ in range(2)]
    job.wait_for_step(12, agents[0])
    os.kill(children(agents[lost].pid)[-1], signal.SIGKILL)
    assert [agent.wait(150) for agent in agents] == [0, 0], [agent.told() for agent in agents]
    assert "".join(agent.told() for agent in agents).count("resuming after step") == 1
    assert job.steps() == list(range(1, 201))
    assert not list(job.out.glob("*.old*"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(("addresses", "how"), [
    (("127.0.0.1", "127.0.0.2"), "lost"),
    (("127.0.0.2", "127.0.0.1"), "asked to end"),  # torchrun sorts them: the newcomer is rank 0
])
def test_a_machine_joins_and_leaves(job, monkeypatch, addresses, how):
    """--nnodes 1:4: when a second agent comes, the first one's process saves and ends, and both go
    on from there, whichever is rank 0; when it is gone the first goes on alone from the last save.
    torchrun counts no restart for a join.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # or torch's agents cannot join
    port = free_port()
    launchers = [[*AGENT, "--nnodes=1:4", "--nproc_per_node=1", "--max_restarts=3",
                  "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}",
                  "--rdzv_conf=last_call_timeout=3,keep_alive_interval=1",
                  f"--local_addr={address}"] for address in addresses]
    first = job.start(launchers[0], "--accumulation_steps=2", "--epochs=9999")
    job.wait_for_step(12, first)
    second = job.start(launchers[1], "--accumulation_steps=2", "--epochs=9999")
    step = job.wait_for_resuming("1 -> 2")
    saved = first.told().partition("stopped by SIGTERM")[0]
    assert step == int(re.findall(r"step (\d+)/", saved)[-1]), "a join was to cost no step"
    job.wait_for_step(step + 12, first)
    job.kill(second) if how == "lost" else second.terminate()
    step = job.wait_for_resuming("2 -> 1")
    job.wait_for_step(step + 12, first)
    first.terminate()
    assert first.wait(60) != 0
    assert job.told.count("resuming after step") == 2
    assert job.steps() == list(range(1, job.steps()[-1] + 1)), "no gap, no double row"
    assert not list(job.out.glob("*.old*"))


@pytest.fixture
def namespaces():
    """Two network namespaces, as two machines with one cable between them; `cable` is the name of
    its card in both.
    """
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces want root and `ip` (iproute2)")
    one, two = names = [f"minimind{os.getpid()}{letter}" for letter in "ab"]
    try:
        for words in (
            f"netns add {one}", f"netns add {two}",
            f"link add cable netns {one} type veth peer name cable netns {two}",
            f"-n {one} addr add 10.77.0.1/24 dev cable",
            f"-n {two} addr add 10.77.0.2/24 dev cable",
            *(f"-n {name} link set {card} up" for name in names for card in ("lo", "cable")),
        ):
            made = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: ip {words}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_networks(namespaces, job, monkeypatch):
    """Two agents that share no loopback, as two machines whose own names mean 127.0.0.1: they meet
    with the flags that the README names for such machines.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")
    agents = [job.start(["ip", "netns", "exec", name, *AGENT, "--nnodes=2", "--nproc_per_node=1",
                         "--rdzv_backend=c10d", "--rdzv_endpoint=10.77.0.1:29500",
                         f"--local_addr=10.77.0.{number}", f"--rdzv_conf=is_host={number == 1}"],
                        "--accumulation_steps=1", "--epochs=999", "--max_steps=12")
              for number, name in enumerate(namespaces, 1)]
    assert [agent.wait(100) for agent in agents] == [0, 0], job.told
    assert job.told.count("world_size 2 | cpu") == job.told.count("step 12/12") == 1
    assert job.steps() == list(range(1, 13))


@pytest.mark.parametrize(("config", "words"), [
    ({"zero_optimization": {"stage": 2}, "fp16": {}, "gradient_clipping": 1, "train_batch_size": 8,
      "wall_clock_breakdown": True},
     ["`fp16` is said by --dtype", "`gradient_clipping` is said by --grad_clip",
      "`train_batch_size` is said by --batch_size", "`wall_clock_breakdown`", "--shard with"]),
    ({"zero_optimization": {"stage": 4}}, ["stage 4, expected 1, 2 or 3", "--shard with"]),
    ({"zero_optimization": {}}, ["expected a JSON file with a `stage`", "--shard with"]),
    (None, ["nowhere.json", "expected a JSON file", "--shard with"]),
])
def test_what_a_deepspeed_file_may_not_say(job, config, words):
    """What flags say already is refused by name, all of it at once, with status 2; so are another
    stage, a file that is not there, and --shard beside --deepspeed.
    """
    path = job.folder / "nowhere.json"
    if config is not None:
        path = job.folder / "config.json"
        path.write_text(json.dumps(config))
    agent = job.start([sys.executable], "--deepspeed", path, "--shard=full")
    assert agent.wait(60) == 2
    for word in words:
        assert word in agent.told(), agent.told()
    assert "Traceback" not in agent.told()
