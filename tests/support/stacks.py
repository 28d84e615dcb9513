"""Frameworks over ``Trainer``, each trained by its own command line, without us and with us, and compared.

python -m tests.support.stacks axolotl FOLDER prints a row for each run. The interpreter must be one in which the
framework is installed: `make test-stacks-all` makes one for each.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.support.environment import let_peft_pass_torchao

STEPS = 3
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "USE_HF": "1", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1",
    "DISABLE_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_DISABLED": "true",
}  # fmt: skip
_WORDS = [f"w{number}" for number in range(400)]


@dataclass
class Trained:
    """What a run has left: what it logged, and the sum of its weights for each tensor."""

    logged: list[dict[str, Any]]
    weights: dict[str, Any]
    printed: str
    seconds: float

    def apart(self, other: Trained) -> tuple[float, float]:
        """Return the largest difference of logged losses, and of weights."""
        pairs = zip(self.logged, other.logged, strict=True)
        losses = [abs(float(one["loss"]) - float(two["loss"])) for one, two in pairs]
        weights = [(value - other.weights[name]).abs().max().item() for name, value in self.weights.items()]
        return max(losses), max(weights)

    @property
    def recoveries(self) -> int:
        """Times that samples have run again because memory ran out."""
        return int(self.logged[-1].get("oom_retries", 0))

    @property
    def padding(self) -> float | None:
        """Tokens computed per token of data, at most in a step; None if that was not logged."""
        return max((float(each["padding"]) for each in self.logged if "padding" in each), default=None)


def make_inputs(folder: Path) -> None:
    """Write a tiny Llama, adapters and a head, which others would draw anew, a tokenizer, and data of three kinds."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = ["Human", "Assistant", "user", "assistant", "system", ":", "<", ">", "|"]
    vocabulary = {word: number for number, word in enumerate([*special, *names, *_WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}"
        "{% if m['role'] == 'assistant' %}{{ '</s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **sizes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    let_peft_pass_torchao()
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, adapters).save_pretrained(folder / "adapters")
    config.num_labels = 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    chance = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(chance.choice(_WORDS) for _ in range(chance.randrange(least, most)))

    (folder / "data").mkdir()
    rows = [{"instruction": text(2, 20), "input": "", "output": text(2, 80)} for _ in range(64)]
    chats = [[("user", row["instruction"]), ("assistant", row["output"])] for row in rows]
    lines = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in chats]
    asked = [{"system": "", "question": row["instruction"], "input": row["instruction"]} for row in rows]
    pairs = [{**each, "chosen": text(2, 50), "rejected": text(2, 50)} for each in asked]
    (folder / "data" / "tiny.json").write_text(json.dumps(rows))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    (folder / "data" / "tiny.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "data" / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def axolotl(folder: Path, out: Path, settings: Any, *, of: str = "sft", **more: Any) -> list[str]:
    """Return the command that trains ``of`` sft, lora, dpo or reward; with ``settings``, by our plugin and key."""
    data: dict[str, Any] = {"path": str(folder / "data" / "tiny.jsonl"), "ds_type": "json", "type": "chat_template"}
    template: dict[str, Any] = {"chat_template": "tokenizer_default"}
    if of == "dpo":
        data = {**data, "path": str(folder / "data" / "pairs.jsonl"), "type": "chatml.intel", "split": "train"}
        template = {"rl": "dpo"}
    elif of == "reward":
        data = {**data, "path": str(folder / "data" / "pairs.jsonl"), "type": "bradley_terry.chat_template"}
        template |= {"reward_model": True, "num_labels": 1, "model_type": "AutoModelForSequenceClassification"}
        template["base_model"] = str(folder / "reward")
    else:
        data["field_messages"] = "messages"
    if of == "lora":
        template |= {"adapter": "lora", "lora_model_dir": str(folder / "adapters"), "lora_target_linear": True}
        template |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # which are CUDA's
    config = {
        "base_model": str(folder / "model"), "tokenizer_type": "AutoTokenizer", "datasets": [data], "val_set_size": 0,
        "dataset_prepared_path": str(out / "prepared"), "output_dir": str(out), "sequence_len": 256,
        "sample_packing": False, "micro_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "optimizer": "adamw_torch", "lr_scheduler": "cosine", "learning_rate": 0.001, "bf16": False, "fp16": False,
        "tf32": False, "logging_steps": 1, "save_strategy": "steps", "save_steps": STEPS, "seed": 1,
        "gradient_checkpointing": False, "special_tokens": {"pad_token": "<pad>"},
        **template, **more,
    }  # fmt: skip
    if settings is not None:
        config |= {"plugins": ["adaptive_batching.axolotl.AdaptivePlugin"], "adaptive": settings}
    return [sys.executable, "-m", "axolotl.cli.train", _written(out, config)]


def llamafactory(folder: Path, out: Path, settings: Any, **more: Any) -> list[str]:
    """Return the command that trains; with ``settings``, by ``run``."""
    config = {
        "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "tiny", "dataset_dir": str(folder / "data"), "template": "default", "cutoff_len": 256,
        "overwrite_cache": True, "preprocessing_num_workers": 1, "output_dir": str(out), "overwrite_output_dir": True,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": STEPS, "report_to": "none", "max_steps": STEPS,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.001, "seed": 1,
        "lr_scheduler_type": "cosine", **more,
    }  # fmt: skip
    train = [str(Path(sys.executable).with_name("llamafactory-cli")), "train", _written(out, config)]
    return train if settings is None else [*_run(settings), *train]


def swift(folder: Path, out: Path, settings: Any, **more: Any) -> list[str]:
    """Return the command that trains; with ``settings``, with our file as a plugin."""
    options = {
        "model": folder / "model", "model_type": "llama", "template": "default", "use_hf": "true",
        "dataset": folder / "data" / "tiny.jsonl", "split_dataset_ratio": 0, "tuner_type": "full",
        "torch_dtype": "float32", "max_length": 256, "max_steps": STEPS, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": "1e-3", "logging_steps": 1, "save_strategy": "steps",
        "save_steps": STEPS, "dataloader_num_workers": 0, "dataset_num_proc": 1, "gradient_checkpointing": "false",
        "bf16": "false", "fp16": "false", "report_to": "none", "add_version": "false", "attn_impl": "sdpa",
        "output_dir": out, "load_from_cache_file": "false", "use_logits_to_keep": "false", **more,
    }  # fmt: skip
    if settings is not None:
        options["external_plugins"] = ROOT / "adaptive_batching" / "swift.py"
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(Path(sys.executable).with_name("swift")), "sft", *given]


def example(stack: str) -> dict[str, Any]:
    """Return what the example of a stack sets, but for its folder, and its model and data, which are from the hub."""
    if stack == "swift":
        shown = (ROOT / "examples" / "swift.sh").read_text()
        given: dict[str, Any] = dict(re.findall(r"--(\w+) ([^\s\\]+)", shown))
    else:
        given = OmegaConf.to_container(OmegaConf.load(ROOT / "examples" / f"{stack}.yaml"))  # type: ignore[assignment]
    own = ("base_model", "datasets", "model_name_or_path", "dataset", "model", "external_plugins", "output_dir")
    return {name: value for name, value in given.items() if name not in own}


STACKS = {"axolotl": axolotl, "llamafactory": llamafactory, "swift": swift}


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "axolotl": {"SFT": {}, "DPO": {"of": "dpo"}, "reward": {"of": "reward"}, "LoRA": {"of": "lora"}},
    "llamafactory": {"SFT": {}},
    "swift": {"SFT": {}},
}
"""What is trained with each, and with which of its settings."""

WAYS: dict[str, dict[str, Any]] = {
    "auto": {"settings": "auto"},
    "2": {"settings": {"micro_batch_size": 2}},
    "short": {"settings": {"micro_batch_size": 2}, "most_tokens": 130},
}
"""Of training with us; the last runs out of memory wherever two longer samples run together."""

MOST_TOKENS = {"dpo": 200, "reward": 600}  # where each sample is two texts, which rewards pad to 256 tokens


def _written(out: Path, config: Mapping[str, Any]) -> str:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "config.yaml"
    path.write_text(json.dumps(config))  # which is YAML
    return str(path)


def _run(settings: Any) -> list[str]:
    given = settings if settings == "auto" else json.dumps(settings)
    return [sys.executable, "-m", "adaptive_batching", "run", "--settings", given, "--"]


def command(
    stack: str, folder: Path, name: str, settings: Any, *, most_tokens: int | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command of a stack; its output is in ``folder / name``.

    With ``most_tokens``, memory runs out in each forward of training that has more.
    """
    given = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    if most_tokens is not None:
        most_tokens = MOST_TOKENS.get(more.get("of", ""), most_tokens)
        paths = [str(ROOT / "tests" / "support" / "short_memory"), str(ROOT)]
        given |= {"SHORT_MEMORY_TOKENS": str(most_tokens), "PYTHONPATH": os.pathsep.join(paths)}
    if settings is not None:
        given["ADAPTIVE_BATCHING_SETTINGS"] = settings if isinstance(settings, str) else json.dumps(settings)
    words: Sequence[str] = STACKS[stack](folder, folder / name, settings, **more)
    return subprocess.run(words, env=given, cwd=folder, capture_output=True, text=True, timeout=600)


def train(stack: str, folder: Path, name: str, settings: Any, **more: Any) -> Trained:
    """Train with a stack, without us if ``settings`` is None."""
    from safetensors.torch import load_file

    start = time.monotonic()
    ran = command(stack, folder, name, settings, **more)
    assert ran.returncode == 0, ran.stderr[-4000:]
    checkpoint = folder / name / f"checkpoint-{STEPS}"
    [saved] = [path for kind in ("model", "adapter_model") if (path := checkpoint / f"{kind}.safetensors").exists()]
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    logged = [each for each in state["log_history"] if "loss" in each]
    return Trained(logged, load_file(saved), ran.stdout + ran.stderr, time.monotonic() - start)


def main() -> None:
    """Print the table of a stack."""
    stack, folder = sys.argv[1], Path(sys.argv[2])
    make_inputs(folder)
    for name, kind in KINDS[stack].items():
        stock = train(stack, folder, f"{name}-stock", None, **kind)
        print(f"{stack} {name} stock: {stock.seconds:.0f} s")
        for way, settings in WAYS.items():
            found = train(stack, folder, f"{name}-{way}", **settings, **kind)
            losses, weights = found.apart(stock)
            print(
                f"{stack} {name} {way}: losses within {losses:.1e}, weights within {weights:.1e}, padding "
                f"{found.padding}, {found.recoveries} recoveries, {found.seconds:.0f} s"
            )


if __name__ == "__main__":
    main()
