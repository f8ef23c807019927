"""How a script ends: a user's mistake with a message and status 2; a traceback is for ours."""

import gc
import sys
from collections.abc import Callable

from model.device import DeviceError
from model.weights import WeightsError
from trainer.common.distributed import ProcessError, is_a_lost_process, is_first_to_say
from trainer.common.finite import NotFiniteError
from trainer.common.memory import OutOfMemory, is_out_of_memory
from trainer.common.state_file import StateError


def run(main: Callable[[], int | None], *user_errors: type[Exception]) -> None:
    """Calls main() and exits with the status it returns (None: 0).

    Errors that a user can mend become one message: those of `model/` and of `trainer/common/`, and
    `user_errors`, which the script brings from `dataset/` because this folder does not import that.
    Of several processes with the same error one prints it.
    """
    gc.freeze()  # what was imported stays: to search it for garbage, again and again, slows a start
    sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese shows "?" for it
    mendable = (DeviceError, WeightsError, StateError, NotFiniteError, OutOfMemory, ProcessError,
                OSError, *user_errors)
    try:
        status = main()
    except BrokenPipeError:  # whoever read our output (`| head`, say) has seen enough
        sys.stderr.close()
        sys.exit(1)
    except mendable as error:
        if is_first_to_say(str(error)):
            print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if is_out_of_memory(error):  # in validation or an update, which nobody can take again
            print(f"{sys.argv[0]}: out of memory: {error}. A smaller --batch_size or "
                  "--max_seq_len, or --gradient_checkpointing 1, need less; --from_resume 1 goes "
                  "on from the last save.", file=sys.stderr)
            sys.exit(2)
        if not is_a_lost_process(error):
            raise
        if is_first_to_say("another process was lost"):
            print(f"{sys.argv[0]}: another process of this run was lost, so this one ends too; "
                  "--from_resume 1 goes on from the last save", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before trainer/common/stop.py listens
        sys.exit(130)  # 128 + SIGINT, as a shell reports it
    sys.exit(status)
