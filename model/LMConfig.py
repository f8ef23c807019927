"""The model's shape, in one frozen dataclass: the only place where its sizes and constants live.

Legend used in all of `model/`:
    B batch   T sequence   C dim   H query heads   K key/value heads   D head dim   V vocabulary
    F feed-forward size
"""

from dataclasses import asdict, dataclass, fields

# Names used by Hugging Face and MiniMind2 configuration files, and the field each one stands for.
OTHER_SPELLINGS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
}


@dataclass(frozen=True)
class LMConfig:
    """Shape of a decoder-only Transformer. Raises ValueError naming every field that cannot be."""

    dim: int = 512  # C
    n_layers: int = 8
    n_heads: int = 8  # H
    n_kv_heads: int = 2  # K: each key/value head serves H / K query heads
    vocab_size: int = 6400  # V
    hidden_dim: int | None = None  # F; None: 8/3 of dim, rounded up to a multiple of 64
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    dropout: float = 0.0

    def __post_init__(self):
        not_numbers = [
            f"{field.name}={value!r}: expected a number"
            for field in fields(self)
            if not isinstance(value := getattr(self, field.name), (int, float, type(None)))
        ]
        if not_numbers:
            raise ValueError("; ".join(not_numbers))
        if self.hidden_dim is None:
            # SwiGLU has three matrices where a plain feed-forward layer of size 4C has two, so
            # 2/3 * 4C keeps the parameter count (arXiv:2002.05202, section 2).
            rounded_up = -(-int(8 * self.dim / 3) // 64)
            object.__setattr__(self, "hidden_dim", 64 * rounded_up)
        problems = [
            f"{name}={getattr(self, name)}: expected a whole number of at least 1"
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim",
                         "max_position_embeddings")
            if type(getattr(self, name)) is not int or getattr(self, name) < 1
        ]
        if not problems:
            if self.dim % (2 * self.n_heads):
                problems.append(
                    f"dim={self.dim}: expected a multiple of 2 * n_heads = {2 * self.n_heads} "
                    "(each head rotates pairs of channels)"
                )
            if self.n_heads % self.n_kv_heads:
                problems.append(
                    f"n_kv_heads={self.n_kv_heads}: expected a divisor of n_heads={self.n_heads}"
                )
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout}: expected a probability, 0 <= dropout < 1")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        """D, the size of one attention head."""
        return self.dim // self.n_heads

    @property
    def num_parameters(self) -> int:
        """Parameters of the model: the tied embedding, and per block q and o, k and v, SwiGLU's
        three matrices and two norms; the last norm.
        """
        C, K = self.dim, self.n_kv_heads * self.head_dim
        block = 2 * C * C + 2 * C * K + 3 * C * self.hidden_dim + 2 * C
        return self.vocab_size * C + self.n_layers * block + C

    def to_dict(self) -> dict:
        """All fields under our names, for a weight file's `.json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "LMConfig":
        """Builds a config from a dictionary in either spelling; keys that are no field are ignored.

        Raises ValueError where both spellings of one field are given and differ.
        """
        known = {field.name for field in fields(cls)}
        chosen = {}
        for key, value in values.items():
            name = OTHER_SPELLINGS.get(key, key)
            if name not in known:
                continue
            if name in chosen and chosen[name] != value:
                raise ValueError(f"{key}={value} contradicts {name}={chosen[name]}")
            chosen[name] = value
        return cls(**chosen)
