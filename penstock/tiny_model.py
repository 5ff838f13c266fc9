"""Makes a small Llama with random weights and its own tokenizer, for first runs and for tests.

The files are the same bytes for the same shape and seed. Nothing is downloaded
and torch is not needed. The text such a model writes means nothing, but it
depends on the whole prompt, varies, and at temperature 0 is the same whatever
else runs in the engine: that holds in float32, where two logits practically
never tie. In bfloat16 the best logits tie every few dozen tokens, and then
the batch's composition decides; compare outputs in float32 only.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.tiny_corpus import sentences

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|close|>")
"""Token ids 0 to 5: begin and end of sequence, the chat roles, and the end of one chat message."""

BEGIN_ID = 0
END_ID = 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{% if not (continue_final_message and loop.last) %}{{ '<|close|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

LEAST_VOCAB_SIZE = 512
"""256 bytes, the special tokens, and enough merges for a prompt to be shorter in tokens than in bytes."""

MOST_VOCAB_SIZE = 32_768
"""The built-in corpus has no room for more merges."""

ATTENTION_GAIN = 1.4
"""Makes attention scores spread by about 2, so that each token looks at few others and the whole prompt matters."""

RESIDUAL_GAIN = 1.5
"""Makes attention and MLP outputs outweigh the last token's embedding, so that greedy text does not cycle."""

LOGIT_SPREAD = 2.0
"""Standard deviation of the logits: sampling at temperature 1 is neither flat nor greedy."""

END_GAIN = 1.4
"""The end token's row is larger than the others by this, so that it ends about one in a hundred tokens' texts."""


class Dtype(StrEnum):
    """Number format of the weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


SAFETENSORS_NAMES = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16"}
"""What the file format calls them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a tiny model; the default has about one million parameters."""

    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    vocab_size: int = 2048
    max_position: int = 2048
    dtype: Dtype = Dtype.FLOAT32

    def check(self) -> None:
        """Raise ValueError that names the field if such a model cannot be made."""
        for name in ("layers", "hidden_size", "heads", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 32:
            raise ValueError("hidden_size must be heads times a multiple of 32 (vLLM's CPU attention needs that)")
        if not LEAST_VOCAB_SIZE <= self.vocab_size <= MOST_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be between {LEAST_VOCAB_SIZE} and {MOST_VOCAB_SIZE}")


FILES = frozenset(
    {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
)
"""What a tiny model consists of."""


def make_tiny_model(directory: Path, shape: Shape | None = None, seed: int = 0) -> Path:
    """Write the FILES of a model of `shape` to `directory` (made if missing) and return the directory.

    Raises ValueError for an impossible shape, OSError if the files cannot be written.
    """
    shape = shape or Shape()
    shape.check()
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, shape, seed)
    _write_weights(directory, shape, seed)
    _write_json(directory / "generation_config.json", {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID})
    # Last, so that a directory with a config is a whole model.
    _write_json(directory / "config.json", _config(shape))
    return directory


def is_model(directory: Path) -> bool:
    """Whether `directory` holds a whole model (of this module or any other in Hugging Face's layout)."""
    return os.path.isfile(directory / "config.json")  # no, too, where one may not look


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.hidden_size * 2,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden_size // shape.heads,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "torch_dtype": shape.dtype.value,
    }


def _write_tokenizer(directory: Path, shape: Shape, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(4 * shape.vocab_size, shape.vocab_size, seed), trainer)
    if tokenizer.get_vocab_size() != shape.vocab_size:
        raise ValueError(f"vocab_size {shape.vocab_size} is more than the corpus gives")
    begin = SPECIAL_TOKENS[BEGIN_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN_ID)]
    )
    # Written here: `save` has errors of its own for what the system says.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": SPECIAL_TOKENS[END_ID],
            "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    )


class _Noise:
    """Random matrices from the raw bits of a generator whose stream is fixed, so that every machine draws the same."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._bits = np.random.PCG64(seed)

    def matrix(self, rows: int, columns: int, deviation: float) -> npt.NDArray[np.float32]:
        """Return rows x columns nearly normal numbers: sums of four 16-bit uniforms, exact in any arithmetic."""
        import numpy as np

        words = np.asarray(self._bits.random_raw(rows * columns), dtype="<u8").view("<u2").reshape(-1, 4)
        centred = words.astype(np.int64).sum(axis=1) - 4 * 32768 + 2
        # The variance of one uniform of 16 bits is 65536^2 / 12; four of them have a deviation of 65536 / sqrt(3).
        scale = deviation * 3**0.5 / 65536
        matrix: npt.NDArray[np.float32] = (centred * scale).astype(np.float32).reshape(rows, columns)
        return matrix


def _weights(shape: Shape, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    import numpy as np

    noise, hidden, inner = _Noise(seed), shape.hidden_size, shape.hidden_size * 2
    per_hidden, per_inner = hidden**-0.5, inner**-0.5
    ones = np.ones(hidden, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": noise.matrix(shape.vocab_size, hidden, 1.0)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = ones
        tensors[at + "self_attn.q_proj.weight"] = noise.matrix(hidden, hidden, ATTENTION_GAIN * per_hidden)
        tensors[at + "self_attn.k_proj.weight"] = noise.matrix(hidden, hidden, ATTENTION_GAIN * per_hidden)
        tensors[at + "self_attn.v_proj.weight"] = noise.matrix(hidden, hidden, RESIDUAL_GAIN * per_hidden)
        tensors[at + "self_attn.o_proj.weight"] = noise.matrix(hidden, hidden, RESIDUAL_GAIN * per_hidden)
        tensors[at + "post_attention_layernorm.weight"] = ones
        tensors[at + "mlp.gate_proj.weight"] = noise.matrix(inner, hidden, RESIDUAL_GAIN * per_hidden)
        tensors[at + "mlp.up_proj.weight"] = noise.matrix(inner, hidden, RESIDUAL_GAIN * per_hidden)
        tensors[at + "mlp.down_proj.weight"] = noise.matrix(hidden, inner, RESIDUAL_GAIN * per_inner)
    tensors["model.norm.weight"] = ones
    head = noise.matrix(shape.vocab_size, hidden, LOGIT_SPREAD * per_hidden)
    head[END_ID] *= END_GAIN
    # The other special tokens are never the model's to say.
    head[BEGIN_ID] = 0
    head[END_ID + 1 : len(SPECIAL_TOKENS)] = 0
    tensors["lm_head.weight"] = head
    return tensors


def _write_weights(directory: Path, shape: Shape, seed: int) -> None:
    """Write the safetensors layout by hand (length, JSON header, data): the same bytes whatever library is there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in sorted(_weights(shape, seed).items()):
        start = len(data)
        data += _packed(tensor, shape.dtype)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[shape.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def _packed(tensor: npt.NDArray[np.float32], dtype: Dtype) -> bytes:
    """Return the little-endian bytes of `tensor` as `dtype`, bfloat16 rounded to nearest even."""
    if dtype is Dtype.FLOAT32:
        return tensor.astype("<f4").tobytes()
    bits = tensor.astype("<f4").view("<u4").astype("<u8")
    rounded: bytes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return rounded


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
