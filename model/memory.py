"""How many bytes a training step takes, by counting the tensors that it keeps.

N = rows x max_seq_len positions, and per position (letters as in `transformer.py`): what autograd
keeps of one block until its backward pass. In float32 every number takes 4 bytes:

    residual stream after each half                         2 C
    each RMSNorm: x / rms(x), and that times the gain       2 x 2 C
    attention: q, k and v repeated for each query head, y   4 C   and H log-sums
    the attention mask, as numbers to be added              T
    feed-forward: gate, silu(gate), up, their product       4 F

That is attention under a mask, which takes the most; where documents lie end to end
(`attention.py`), there is no mask, and k and v are not repeated.
Under autocast (16 bits) the stream and x / rms(x) stay float32; what goes into matrix products is
a 16-bit copy for each product (3 C and 2 C after the norms), and so is the rest. Each weight has a
16-bit copy as well. Dropout adds a byte a number where it acts.

With gradient checkpointing a block keeps its input, C in float32. Beside that the larger of two
moments counts: the loss with its logits, while autocast still has the copies of all weights, or the
backward pass of one block, with the above and the copies of that block alone.

Beside them: weights, gradients and two moments in float32; the embedding's output and the last
norm, 5 C; of the loss (`loss.py`) the gradients of its inputs, and two chunks of logits (logits and
their log-softmax).
Not counted: what kernels need while they run, and the allocator's own losses.
"""

import torch

from model.LMConfig import LMConfig
from model.loss import CHUNK


def block_bytes(config: LMConfig, max_seq_len: int, dtype: torch.dtype) -> int:
    """Bytes for each position that one block keeps between forward and backward."""
    C, F, T = config.dim, config.hidden_dim, max_seq_len
    dropped = 2 * C if config.dropout else 0
    if dtype == torch.float32:
        return 4 * (10 * C + 4 * F + config.n_heads + T) + dropped
    return 4 * (4 * C + config.n_heads) + 2 * (5 * C + 4 * C + 4 * F + T) + dropped


def predicted_bytes(config: LMConfig, rows: int, max_seq_len: int, dtype: torch.dtype,
                    gradient_checkpointing: bool = False) -> dict[str, int]:
    """Bytes of a step by kind (weights, gradients, optimizer, activations, logits), and of all."""
    N, C = rows * max_seq_len, config.dim
    parameters = config.num_parameters
    half_weights = 0 if dtype == torch.float32 else 2 * parameters
    block = N * block_bytes(config, max_seq_len, dtype)
    blocks = block * config.n_layers
    chunks = 2 * 4 * min(CHUNK, N) * config.vocab_size
    if gradient_checkpointing:
        one_block = block + half_weights // config.n_layers
        blocks = N * 4 * C * config.n_layers + max(one_block - chunks - half_weights, 0)
    kinds = {
        "weights": 4 * parameters + half_weights,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "activations": blocks + N * 5 * 4 * C,
        "logits": chunks + 4 * config.vocab_size * C,
    }
    return {**kinds, "all": sum(kinds.values())}
