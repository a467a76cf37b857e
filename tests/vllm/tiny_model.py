"""Writes a Llama of random weights (2 layers, 0.8 million parameters, 3 MB) that a real vLLM serves on a CPU.

    python tiny_model.py DIRECTORY

Runs in vLLM's environment, downloads nothing, and gives the same model every time. Its byte-level BPE is trained on the
language reference that comes with Python. What it says is nonsense, with broken UTF-8 now and then: tokens that show
no text, as real models make them, only more often. Any token may come next, so end a reply with `max_tokens`, keep it
going with `ignore_eos`, end it at once with `logit_bias` on END.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, START, END = 0, 1, 2
VOCABULARY, CONTEXT = 2000, 4096
HIDDEN, INNER, LAYERS = 128, 256, 2
HEADS, KV_HEADS, HEAD = 4, 2, 32  # vLLM's attention on the CPU takes head sizes that are multiples of 32
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return bpe


def weights() -> dict[str, np.ndarray]:
    """Wide enough (twice the usual deviation) that the text wanders instead of repeating one token for ever."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 2 * columns**-0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        named = {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        norms = {f"model.layers.{layer}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        tensors |= named | norms
    return {name: tensor.copy() for name, tensor in tensors.items()}  # safetensors refuses shared memory


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
    "chat_template": TEMPLATE,
}


def write(directory: Path) -> None:
    """config.json comes last: where it is, the model is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("tokenizer_config", TOKENIZER_CONFIG), ("config", CONFIG)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
