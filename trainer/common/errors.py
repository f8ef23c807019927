"""A user's mistake ends with a message and exit status 2; a traceback is for our mistakes."""

import sys
from collections.abc import Callable

from model.device import DeviceError
from model.weights import WeightsError


def run(main: Callable[[], None], *user_errors: type[Exception]) -> None:
    """Calls main(), turning errors that a user can mend into one message.

    These are the model folder's own and `user_errors`, which the script brings from `dataset/`
    because this folder does not import that one.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese shows "?" for it
    try:
        main()
    except BrokenPipeError:  # whoever read our output (`| head`, say) has seen enough
        sys.stderr.close()
        sys.exit(1)
    except (DeviceError, WeightsError, OSError, *user_errors) as error:  # OSError: a full disk, say
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; what was saved before is in --out_dir", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell reports it
