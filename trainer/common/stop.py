"""When a run ends before its last step: a signal, or --max_minutes.

The first SIGINT, SIGTERM or SIGHUP lets the step that is running end; then the loop saves and
leaves, with exit status 128 + signal. Launchers and terminals signal the whole process group, often
twice, so a second one counts only after two seconds: it ends the process at once, unsaved.
Loader workers ignore these signals (`dataset/loader.py`).
"""

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from trainer.common.console import say
from trainer.common.distributed import Dist

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]
GRACE = 5.0  # seconds to clean up in, before the first step
PATIENCE = 2.0  # seconds before a second signal counts
AGREEMENT = 15.0  # seconds that processes have to agree on the last step, beside a step's own time
TIME_IS_UP = 0.5  # a reason to stop that is no signal, and weaker than any


class Stop:
    """Notes that the run has been asked to end; `now()` is asked once after every step.

    Before `begin()` nothing could be saved yet, and a signal ends the process where it stands.
    """

    def __init__(self, dist: Dist, max_minutes: float):
        self.dist = dist
        self.limit = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self.signal, self.signalled_at = 0, 0.0
        self.reason: float = 0  # what all processes agreed on: a signal, TIME_IS_UP, or 0
        self.begun = self.settled = False
        self.lock = threading.RLock()  # a second handler can interrupt the first one
        self.asked_at, self.longest_step = time.monotonic(), 0.0
        # The interpreter writes a signal's number here at once, even while the main thread is
        # deep in a matrix product or waits for another process; a handler would have to wait.
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.listen()
        threading.Thread(target=self.watch, daemon=True).start()

    def listen(self) -> None:
        """Takes the signals over, but for those that are ignored, as `nohup` has SIGHUP ignored."""
        signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame) -> None:
        """Runs in the main thread, between two of its instructions."""
        if not self.begun:
            say(f"\nstopped by {signal.Signals(number).name} before the first step", sys.stderr)
            sys.exit(128 + number)
        if self.is_first(number):
            self.announce(signal.Signals(number).name)

    def watch(self) -> None:
        """Runs in a thread of its own: hears signals whatever the main thread is doing."""
        while number := self.receiver.recv(1):
            if number[0] not in SIGNALS:
                continue
            name = signal.Signals(number[0]).name
            if self.is_first(number[0]):
                if self.begun:
                    self.announce(name)
                else:  # `handle` ends us, unless the main thread does not get to it
                    self.later(GRACE, lambda: os._exit(128 + self.signal))
            elif time.monotonic() - self.signalled_at > PATIENCE:
                say(f"{name} again: stopped at once", sys.stderr)
                os._exit(128 + number[0])

    def is_first(self, number: int) -> bool:
        """Notes a signal if it is the first; whichever of the two threads comes first does."""
        with self.lock:
            if self.signal:
                return False
            self.signal, self.signalled_at = number, time.monotonic()
            return True

    def announce(self, name: str) -> None:
        """Says what follows, and sees to it that a dead neighbour cannot hold us."""
        if self.dist.is_main:
            say(f"\n{name}: saving after this step; once more stops at once", sys.stderr)
        if self.dist.world_size > 1:
            self.later(AGREEMENT + self.longest_step, self.give_up)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something later, if the process is still there."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def give_up(self) -> None:
        """Ends a process that waits in vain for the others."""
        if not self.settled:
            say(f"rank {self.dist.rank}: the processes could not agree on a last step within "
                f"{AGREEMENT:.0f} s; ended without saving", sys.stderr)
            os._exit(128 + self.signal)

    def begin(self) -> None:
        """From here on a signal waits for the end of a step."""
        self.listen()  # once more: a tracker may have taken them meanwhile
        self.begun, self.asked_at = True, time.monotonic()
        if self.signal:  # it came while the last preparations were under way
            sys.exit(128 + self.signal)

    @property
    def asked(self) -> bool:
        """True once this process was asked to end; others may not know yet."""
        return self.signal > 0 or time.monotonic() > self.limit

    def until_asked(self, items: Iterable) -> Iterator:
        """The items, as long as no process is asked to end; then `cut_short` is True."""
        self.cut_short = False
        for item in items:
            if self.dist.max(self.asked) == [True]:
                self.cut_short = True
                return
            yield item

    @property
    def vote(self) -> float:
        """Why this process would end."""
        return self.signal or (TIME_IS_UP if self.asked else 0)

    def now(self, is_last: bool) -> bool:
        """True, on all processes after the same step, once any of them was asked to end.

        After the last step there is nothing left to agree on, whoever signals.
        """
        [self.reason] = self.dist.max(self.vote)
        self.settled = self.reason > 0 or is_last
        self.longest_step = max(self.longest_step, time.monotonic() - self.asked_at)
        self.asked_at = time.monotonic()
        return self.settled

    def finish(self) -> int:
        """Parts from the other processes, and returns the exit status: 128 + signal, as a shell
        reports it; 0 after the last step or a time limit. Prints the line that resumes, if the run
        did not reach its end by itself.
        """
        [self.reason] = self.dist.max(self.signal or self.reason)  # one may have come at the end
        self.dist.finish()
        if not self.reason:
            return 0
        by_time = self.reason == TIME_IS_UP
        name = "--max_minutes" if by_time else signal.Signals(int(self.reason)).name
        if self.dist.is_main:
            say(f"stopped by {name}; to go on: {resume_command()}")
        return 0 if by_time else 128 + int(self.reason)


def resume_command() -> str:
    """The command line of this process, with --from_resume 1."""
    arguments = sys.argv[1:]
    for number, argument in enumerate(arguments):
        if argument == "--from_resume":
            arguments[number : number + 2] = []
    arguments = [argument for argument in arguments
                 if not argument.startswith(("--from_resume=", "--local_rank", "--local-rank"))]
    command = shlex.join([sys.argv[0], *arguments, "--from_resume", "1"])
    world_size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{'python' if world_size == '1' else f'deepspeed --num_gpus={here}'} {command}"
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    if machines != "1":
        return (f"on each machine: torchrun --nnodes {machines} --nproc_per_node {here} (and the "
                f"other flags that torchrun had) {command}")
    return f"torchrun --nproc_per_node {here} {command}"
