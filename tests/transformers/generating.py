"""Trainers of TRL that generate, on tiny models: what is common to their tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from adaptive_batching.transformers import adaptive
from tests.support.environment import let_peft_pass_torchao

VOCABULARY, COMPLETION, BATCH = 64, 24, 8


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(kind: str = "llama", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    if kind == "llama":
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, max_position_embeddings=128, initializer_range=0.1, attention_dropout=dropout,
                **shape, **special,
            )
        )  # fmt: skip
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.1, **sizes, **without, **special))


class Rewards:
    """Share of distinct words, and how often it was asked for."""

    __name__ = "distinct"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
        self.calls += 1
        return [len(set(text.split())) / 10 + 0.01 * len(text.split()) for text in completions]


def with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that are drawn, of which each fourth token is what a tool has answered."""
    draws = random.Random(trainer.state.global_step)
    lengths = [draws.randint(3, COMPLETION) for _ in prompts]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [[draws.randrange(2, 60) for _ in range(length)] for length in lengths],
        "env_mask": [[int(at % 4 != 1) for at in range(length)] for length in lengths],
        "logprobs": None,
    }


class SeesLogs(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))


GIVEN: dict[str, Any] = {
    "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2, "max_completion_length": COMPLETION,
    "learning_rate": 1e-3, "max_steps": 2, "logging_steps": 1, "seed": 3, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip


def prompts() -> Dataset:
    """32 prompts of 3 to 15 words."""
    lengths = [3 + 3 * (row % 5) for row in range(32)]
    return Dataset.from_list(
        [{"prompt": " ".join(f"w{(7 * row + at) % 61}" for at in range(length))} for row, length in enumerate(lengths)]
    )


def adapters() -> LoraConfig:
    let_peft_pass_torchao()
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make(
    folder: Path, ours: Any = None, *, kind: Any = GRPOTrainer, config: Any = GRPOConfig, model: Any = None,
    saved: Path | None = None, lora: bool = False, rollout_func: Any = None,
    callbacks: Sequence[TrainerCallback] = (), **settings: Any,
) -> Any:  # fmt: skip
    """Return a trainer, with its ``rewards`` and ``seen_logs``, that is adaptive by the settings ``ours``, if any.

    The model is the one ``saved``, or else ``model``.
    """
    path = saved or folder / "model"  # of which TRL loads the reference, too
    if saved is None:
        (make_model() if model is None else model).save_pretrained(path)
    rewards, seen = Rewards(), SeesLogs()
    given = GIVEN | {"num_generations": 4, "beta": 0.1, "num_iterations": 2} | settings
    own: dict[str, Any] = {} if ours is None else {"adaptive": ours}
    if rollout_func is not None:
        own["rollout_func"] = rollout_func
    if lora:
        own["peft_config"] = adapters()
    trainer = adaptive(kind)(
        model=str(path), args=config(output_dir=str(folder / "out"), **given),
        reward_funcs=rewards, train_dataset=prompts(), processing_class=tokenizer(), callbacks=[*callbacks, seen],
        **own,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.rewards, trainer.seen_logs = rewards, seen.logs
    return trainer


def make_distilling(
    folder: Path, ours: Any = None, *, model: str = "llama", teacher: str = "llama", saved: Path | None = None,
    lora: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Return a trainer whose student learns from a teacher with weights of another size, both ``saved`` or made."""
    path = saved or folder
    if saved is None:
        save_student_and_teacher(path, model, teacher)
    given: dict[str, Any] = GIVEN | {"teacher_model_init_kwargs": {"dtype": "float32"}} | settings
    own: dict[str, Any] = {} if ours is None else {"adaptive": ours}
    if lora:
        own["peft_config"] = adapters()
    seen = SeesLogs()
    trainer = adaptive(DistillationTrainer)(
        model=str(path / "student"), teacher_model=str(path / "teacher"),
        args=DistillationConfig(output_dir=str(folder / "out"), **given), train_dataset=prompts(),
        processing_class=tokenizer(), callbacks=[seen], **own,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.seen_logs = seen.logs
    return trainer


def save_student_and_teacher(folder: Path, model: str = "llama", teacher: str = "llama") -> None:
    make_model(model).save_pretrained(folder / "student")
    larger = make_model(teacher)
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.mul_(1.5)
    larger.save_pretrained(folder / "teacher")


def trained_once(train: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that returns the trainer of a kind once it has trained, which it does once."""
    made: dict[str, Any] = {}

    def of(kind: str) -> Any:
        if kind not in made:
            made[kind] = train(kind)
        return made[kind]

    return of


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).double()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def logs_off(stock: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how far each value of the logs is off at most, but times."""
    timed = ("time", "per_second", "profiling", "epoch")
    off: dict[str, float] = {}
    for one, other in zip(stock, ours, strict=True):
        for key in one:
            if not any(word in key for word in timed):
                error = abs(float(one[key]) - float(other[key])) / max(abs(float(one[key])), 1e-3)
                off[key] = max(off.get(key, 0.0), error)
    return off


@contextmanager
def failing(owner: Any, name: str, at: Sequence[int]) -> Iterator[list[int]]:
    """Have a method run out of memory at its calls of these numbers, from 0; gives a list of those that have."""
    method: Callable[..., Any] = getattr(owner, name)
    failed: list[int] = []
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 in at:
            failed.append(calls - 1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return method(*args, **kwargs)

    own = name in vars(owner)
    setattr(owner, name, call)
    try:
        yield failed
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def fails_in_backward(trainer: Any, at: list[int]) -> list[int]:
    """Run out of memory in a backward, where all but the embedding has its gradient; once there are completions."""
    ran: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        if trainer._buffered_inputs is None:  # in the probe
            return
        ran.append(len(ran))
        if ran[-1] in at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    trainer.model.get_input_embeddings().weight.register_hook(hook)
    return ran
