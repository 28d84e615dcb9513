"""Make small but real inputs for a first fine-tuning run, without downloading anything.

The data are signatures and docstrings of Python's own standard library, the tokenizer is trained on them, and the model
is a randomly initialised Llama of about 5 million parameters::

    data/quickstart/train.json       [{"instruction": "def shlex.quote(s)", "output": "Return a shell-escaped ..."}, ..]
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
import os
import platform
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
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

_MAX_OUTPUT_CHARS = 2000  # all but two dozen docstrings are shorter
# A prompt that fills the whole sequence leaves no label to learn from, and a batch of such samples has the loss 0/0.
_MAX_INSTRUCTION_CHARS = 200
_MIN_OUTPUT_CHARS = 20  # shorter docstrings ("Undocumented.", "See above.") say nothing about their function

# Tests, applications and retired packages: little of it documents an interface.
_SKIPPED_PACKAGES = {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
# Private modules that hold the documentation of public ones, under the name that their users import.
_PUBLIC_NAMES = {
    "_collections_abc": "collections.abc", "_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io",
    "concurrent.futures._base": "concurrent.futures", "pathlib._local": "pathlib",
}  # fmt: skip

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
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _is_public(dotted_name: str) -> bool:
    return all(part.isidentifier() and not part.startswith("_") for part in dotted_name.split("."))


def _find_modules(stdlib: Path) -> Iterator[tuple[str, Path]]:
    """Yield the public modules: (dotted name, source file)."""
    for folder, subfolders, files in os.walk(stdlib):
        # site-packages, which can hold a hundred times more files than the library, is no identifier.
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name not in _SKIPPED_PACKAGES]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            name = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
            name = _PUBLIC_NAMES.get(name, name)
            if _is_public(name):
                yield name, path


def _find_documented(body: Iterable[ast.AST], prefix: str) -> Iterator[tuple[str, _Documented]]:
    """Yield public definitions in ``body``, those in classes as well: (qualified name, node)."""
    for node in body:
        if isinstance(node, _Documented) and _is_public(node.name):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _find_documented(node.body, name)
        elif isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):  # definitions that depend on the platform
            yield from _find_documented(ast.iter_child_nodes(node), prefix)


def _signature(name: str, node: _Documented) -> str:
    """Return what opens a definition, its name qualified: ``async def asyncio.Queue.put(self, item)``."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {name}({bases})" if bases else f"class {name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{keyword} {name}({ast.unparse(node.args)}){returns}"


def _shorten(text: str) -> str:
    """Return what fits of ``text``: whole paragraphs, else whole sentences, else whole words."""
    if len(text) <= _MAX_OUTPUT_CHARS:
        return text
    start = text[: _MAX_OUTPUT_CHARS + 1]  # a character more, so that a border right behind the limit counts
    for border in (r"\n\s*\n", r"(?<=[.!?:])\s", r"\s"):
        if splits := [match.start() for match in re.finditer(border, start)]:
            return text[: splits[-1]].rstrip()
    return text[:_MAX_OUTPUT_CHARS]


def _extract_pairs(stdlib: Path, seed: int) -> list[dict[str, str]]:
    """Read pairs of signature and docstring, each once and shuffled, out of sources that are never imported."""
    pairs = set()
    for module, path in _find_modules(stdlib):
        for name, node in _find_documented(ast.parse(path.read_bytes()).body, module):
            docstring = ast.get_docstring(node, clean=True) or ""
            instruction, output = _signature(name, node), _shorten(docstring.strip())
            if len(instruction) <= _MAX_INSTRUCTION_CHARS and len(output) >= _MIN_OUTPUT_CHARS:
                pairs.add((instruction, output))
    # Inherited docstrings are often repeated word for word; learning them once is enough.
    taken: set[str] = set()
    unique = []
    for instruction, output in sorted(pairs):
        if taken.isdisjoint((instruction, output)):
            taken |= {instruction, output}
            unique.append({"instruction": instruction, "output": output})
    random.Random(seed).shuffle(unique)
    return unique


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
