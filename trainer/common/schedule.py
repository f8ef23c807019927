"""When things happen: the learning rate of a step, and what is due after it."""

import math
from argparse import Namespace


def warmup_cosine(step: int, total_steps: int, warmup_steps: int, peak: float, min_ratio: float
                  ) -> float:
    """Learning rate of step 0, 1, ..., total_steps - 1.

    It rises linearly to the peak over warmup_steps (at most a tenth of the run), then follows half
    a cosine down to min_ratio * peak at the last step (arXiv:1608.03983, without restarts).
    """
    warmup_steps = min(warmup_steps, total_steps // 10)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return peak * (min_ratio + (1 - min_ratio) * cosine)


def learning_rate(step: int, total_steps: int, args: Namespace) -> float:
    """The learning rate of a step, as the flags say."""
    return warmup_cosine(step, total_steps, args.warmup_steps, args.learning_rate,
                         args.min_lr_ratio)


def depth(step: int, total_steps: int, args: Namespace) -> int:
    """Blocks in use at a step: first --start_layers, and all in the last step at the latest.

    In between are n_layers / 2, n_layers / 4 and so on, rounded up, if larger than the first.

    A shallow model learns as much from its first tokens as a deep one, at a fraction of the cost
    (progressive stacking, Gong et al. 2019; here new blocks begin near the identity). Each number
    gets the same share of the run's compute, with the output layer counted as one block more.
    """
    stages = [args.n_layers]
    while stages[0] > (args.start_layers or args.n_layers):
        stages.insert(0, max(-(-stages[0] // 2), args.start_layers))
    if step == total_steps - 1:
        return args.n_layers
    steps = [1 / (blocks + 1) for blocks in stages]  # of one compute each
    progress = step / total_steps * sum(steps)
    for blocks, share in zip(stages, steps):
        if progress < share:
            return blocks
        progress -= share
    return args.n_layers


def is_due(step: int, interval: int, total_steps: int) -> bool:
    """True after every interval-th step (counted from 0) and after the last; interval 0: only then.
    """
    done = step + 1
    return done == total_steps or (interval > 0 and done % interval == 0)
