"""Make small but real inputs for a first fine-tuning run, without downloading anything.

The data are names and docstrings of Python's own standard library, the tokenizer is trained on them, and the model
is a randomly initialised Llama of about 5 million parameters::

    data/quickstart/train.json       [{"instruction": "shlex.quote", "output": "Return a shell-escaped ..."}, ..]
    data/quickstart/preferences.json the same as conversations, "chosen" and "rejected": with another's docstring
    data/quickstart/tokenizer.model  SentencePiece, for torchtune.models.llama2.llama2_tokenizer
    data/quickstart/model/           Hugging Face layout, for torchtune.training.FullModelHFCheckpointer
    data/quickstart/quickstart.json  the settings that all of this was built with
"""

from __future__ import annotations

import ast
import io
import json
import logging
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import nn
from torchtune.models import convert_weights
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerDecoder

logger = logging.getLogger(__name__)

_OUTPUT_CHARS = range(20, 2000)  # a shorter docstring ("See above.") says nothing about what it documents

_FILES = ("train.json", "preferences.json", "tokenizer.model", "model/config.json", "model/model.safetensors")
_SETTINGS_FILE = "quickstart.json"


@dataclass(frozen=True)
class Architecture:
    """Arguments of ``torchtune.models.llama2.llama2``; the ``model`` section of a config has to repeat them."""

    vocab_size: int = 4096
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    embed_dim: int = 256
    intermediate_dim: int = 768
    max_seq_len: int = 512


_ARCHITECTURE = Architecture()


def _extract_pairs(stdlib: Path, seed: int) -> list[dict[str, str]]:
    """Return names and docstrings of the standard library, each once and shuffled; nothing of it is imported."""
    names: dict[str, str] = {}  # by the docstring: one that is inherited is often repeated word for word
    for module in sorted(sys.stdlib_module_names):
        for path in (stdlib / f"{module}.py", *sorted((stdlib / module).rglob("*.py"))):
            within = path.relative_to(stdlib).with_suffix("").parts
            if not path.is_file() or {"test", "tests"} & {*within}:  # tests hold files that are not Python
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    docstring = ast.get_docstring(node) or ""
                    if len(docstring) in _OUTPUT_CHARS:
                        names.setdefault(docstring, ".".join((*within, node.name)))
    pairs = [{"instruction": name, "output": docstring} for docstring, name in names.items()]
    random.Random(seed).shuffle(pairs)
    return pairs


def _prefer(pairs: Sequence[dict[str, str]]) -> list[dict[str, list[dict[str, str]]]]:
    """Return preferences as ``torchtune.datasets.preference_dataset`` reads them: each docstring over the next."""

    def conversation(pair: dict[str, str], answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": pair["instruction"]}, {"role": "assistant", "content": answer}]

    return [
        {"chosen": conversation(pair, pair["output"]), "rejected": conversation(pair, other["output"])}
        for pair, other in zip(pairs, [*pairs[1:], *pairs[:1]], strict=True)
    ]


def _train_tokenizer(pairs: Sequence[dict[str, str]], path: Path, vocab_size: int) -> None:
    """Train a SentencePiece model in the manner of Llama 2, from which every text comes back unchanged."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for pair in pairs for text in pair.values() for line in text.splitlines()),
        model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,  # indentation: one piece for a run of blanks
        # torchtune's Llama2Tokenizer pads with 0 whatever the file says, so 0 is a padding piece, which decodes to
        # nothing; Llama 2 has its unknown piece there.
        pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        # The tags of torchtune's Llama2ChatTemplate, in every sample: a piece each instead of five.
        user_defined_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def build_model(architecture: Architecture = _ARCHITECTURE, seed: int = 0) -> TransformerDecoder:
    """Return a Llama with weights drawn from N(0, 0.02), so that its first loss is close to ``ln(vocab_size)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: TransformerDecoder = llama2(**asdict(architecture))
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
    return model


def save_checkpoint(model: TransformerDecoder, model_dir: Path, architecture: Architecture = _ARCHITECTURE) -> None:
    """Write ``config.json`` and ``model.safetensors`` to ``model_dir`` in the Hugging Face layout of a Llama."""
    model_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.embed_dim,
        "intermediate_size": architecture.intermediate_dim,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "max_position_embeddings": architecture.max_seq_len,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,  # what torchtune's llama2 takes by default
    }  # fmt: skip
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state_dict = convert_weights.tune_to_hf(
        model.state_dict(), architecture.num_heads, architecture.num_kv_heads, architecture.embed_dim
    )
    save_file(state_dict, model_dir / "model.safetensors", metadata={"format": "pt"})


def build(output_dir: Path, architecture: Architecture = _ARCHITECTURE, seed: int = 0) -> None:
    """Build data, tokenizer and model; a folder with anything but the same build is a FileExistsError."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    settings = {"python": platform.python_version(), "stdlib": str(stdlib), "seed": seed, **asdict(architecture)}
    if output_dir.exists() and any(output_dir.iterdir()):
        complete = all((output_dir / name).is_file() for name in (*_FILES, _SETTINGS_FILE))
        if complete and json.loads((output_dir / _SETTINGS_FILE).read_text(encoding="utf-8")) == settings:
            logger.info("%s is complete, nothing to do", output_dir)
            return
        # Trained models may lie next to the inputs by now, so nothing is deleted unasked.
        raise FileExistsError(
            f"output_dir={output_dir} exists but is not the complete result of {settings}; "
            "remove it or choose another output_dir"
        )

    start = time.perf_counter()
    pairs = _extract_pairs(stdlib, seed)
    model = build_model(architecture, seed)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output_dir.name}-", dir=output_dir.parent) as scratch:
        staged = Path(scratch, output_dir.name)
        save_checkpoint(model, staged / "model", architecture)
        _train_tokenizer(pairs, staged / "tokenizer.model", architecture.vocab_size)
        for name, data in (("train.json", pairs), ("preferences.json", _prefer(pairs))):
            (staged / name).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (staged / _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        staged.replace(output_dir)
    seconds = time.perf_counter() - start
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    logger.info("built %s in %.1f s: %d pairs, %.2f million parameters", output_dir, seconds, len(pairs), millions)
