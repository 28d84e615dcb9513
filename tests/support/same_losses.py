"""Hold the losses of some fifty kinds of run against those of another commit, bit for bit.

    python -m tests.support.same_losses cba35f9            # all of them, in both trees, on this machine
    python -m tests.support.same_losses HEAD~3 split ppo     # those whose names contain a word

Each run has a process of its own. It is a real recipe on real text, Trainer, or a plain loop: with all fields unset,
growing, split, probed, recovered from an error, resumed, on two ranks. What is compared are the metrics of every step,
without timings, and the sum of every weight. The last line printed is a JSON object.

Trainer and the plain loop run as tests have them run, each tree with its own tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import nn

SMALL = dict(
    vocab_size=700, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=128, intermediate_dim=256, max_seq_len=512
)
_DOUBLE = ("batch_increase_function._component_=adaptive_batching.growth.step",)
_FULL, _LORA = "full_finetune_single_device", "lora_finetune_single_device"
_VALIDATE = (
    "dataset_val._component_=torchtune.datasets.instruct_dataset", "dataset_val.source=json",
    "dataset_val.data_files=${data_dir}/train.json", "dataset_val.column_map=${dataset.column_map}",
    "dataset_val.split=train[60:71]", "dataset_val.train_on_input=True", "run_val_every_n_steps=3",
)  # fmt: skip
_TEACHER = (
    "teacher_model._component_=torchtune.models.llama2.llama2", *(f"teacher_model.{k}={v}" for k, v in SMALL.items()),
    "teacher_checkpointer._component_=torchtune.training.FullModelHFCheckpointer", "kd_ratio=0.5",
    "teacher_checkpointer.checkpoint_dir=${data_dir}/teacher", "teacher_checkpointer.output_dir=${output_dir}",
    "teacher_checkpointer.checkpoint_files=[model.safetensors]", "teacher_checkpointer.model_type=LLAMA2",
    "kd_loss._component_=torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
)  # fmt: skip
_PROBE = (
    "use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB", "adaptive_batching.max_batch_size=16",
)  # fmt: skip
_POLICY = ("policy_model._component_=same_losses.full",)
_KD, _DPO = "knowledge_distillation_single_device", "lora_dpo_single_device"
_EPOCH_1 = "checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]"


@dataclass(frozen=True)
class Kind:
    """A kind of run; ``fails_at`` is the call of the model's second layer that runs out of memory."""

    recipe: str
    config: str = "full_single_device"
    overrides: tuple[str, ...] = ()
    fails_at: int | None = None
    resumes: tuple[str, ...] | None = None
    """Settings with which the run goes on that has ended before its third epoch; None to run through."""

    ranks: int = 1
    with_gradients: bool | None = None
    """Count calls where gradients are computed, if True, or where none are, as in validation; None for all calls."""


@dataclass(frozen=True)
class Loop:
    """A run of what is no recipe: ``train`` works in a folder, and returns the metrics of its steps and weights."""

    train: Callable[[Path], dict[str, Any]]
    ranks: int = 1


def trainer(folder: Path, kind: str = "", most_tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    """Train with Hugging Face's Trainer, or TRL's of a ``kind``; one forward of more than ``most_tokens`` fails."""
    from adaptive_batching.transformers import AdaptiveArguments
    from tests.transformers import test_trl, trainers, two_ranks

    ours = AdaptiveArguments(**fields)
    if kind:
        test_trl.chance.seed(1)
        made = test_trl.make(kind, folder, test_trl.make_tokenizer(), ours)
    else:
        model = trainers.make_llama(attention_dropout=0.1)
        made = trainers.make_trainer(folder, ours, model=model, gradient_accumulation_steps=2)
    if most_tokens is not None:
        trainers.OutOfMemory(made.model, most_tokens, times=2)
    made.train()
    found = two_ranks.outcome(made)
    assert (found.get("recoveries", 0) > 0) == (most_tokens is not None)
    return {"steps": [list(step.items()) for step in found.pop("logged")], "weights": found}


def evaluation(folder: Path) -> dict[str, Any]:
    """Evaluate with Trainer, in memory that is too short for most of its batches."""
    from adaptive_batching.transformers import AdaptiveArguments
    from tests.transformers import trainers

    made = trainers.make_trainer(folder, AdaptiveArguments(micro_batch_size="auto"))
    short = trainers.OutOfMemory(made.model, 60, in_training=False)
    found = made.predict(trainers.make_data(21))
    assert short.failures
    metrics = [pair for pair in found.metrics.items() if pair[0] == "test_loss"]
    return {"steps": [metrics, [["failures", short.failures]]], "weights": {"logits": found.predictions.tolist()}}


def trainer_on_ranks(folder: Path, name: str) -> dict[str, Any]:
    """Train with Trainer on two ranks, in a run of its tests; memory is short on the second alone."""
    from tests.transformers import two_ranks

    found = two_ranks.run(name, folder)
    steps = found.pop("logged", [found])  # an evaluation has none
    return {"steps": [list(step.items()) for step in steps], "weights": found}


def plain_loop(folder: Path, max_tokens: int | None = None, *, recovers: bool = False) -> dict[str, Any]:
    """Take steps of AdaptiveStep, with dropout."""
    from tests.loop import test_step

    model, step = test_step.make(max_tokens=max_tokens, max_grad_norm=0.5, dropout=0.1)
    if recovers:
        test_step.always(model, times=3)
    batches = (test_step.SAMPLES, test_step.texts(4, 11, 6), test_step.texts(12, 29, 20, 8, 8, 2, 17))
    losses = [[["loss", step(batch).item()]] for batch in batches]
    assert (step.num_recoveries > 0) == recovers
    weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
    return {"steps": [*losses, [["forwards", model.forwards]]], "weights": weights}


def plain_loop_on_ranks(folder: Path, name: str) -> dict[str, Any]:
    """Take steps of AdaptiveStep on two ranks, in a case of its tests."""
    from tests.loop import two_ranks

    torch.distributed.init_process_group("gloo")
    found = two_ranks.train(*name.split(", "))
    weights = dict(enumerate(each.tolist() for each in found["weights"]))
    return {"steps": [[[key, found[key]] for key in ("losses", "recoveries", "forwards")]], "weights": weights}


_of_lora, _of_dpo = partial(Kind, config="lora_single_device"), partial(Kind, _DPO, "lora_dpo_single_device")
KINDS: dict[str, Kind | Loop] = {
    "off full": Kind(_FULL),
    "off full accumulating": Kind(_FULL, overrides=("gradient_accumulation_steps=3",)),
    "off full in backward": Kind(_FULL, overrides=("optimizer_in_bwd=True", "clip_grad_norm=null")),
    "off lora": _of_lora(_LORA),
    "off dpo": _of_dpo(),
    "off distillation": _of_lora(_KD, overrides=_TEACHER),
    "growing full": Kind(_FULL, overrides=(*_DOUBLE, "adaptive_batching.lr_scaling=sqrt")),
    "growing full within epochs": Kind(_FULL, overrides=(*_DOUBLE, "adaptive_batching.increase_every=0.5")),
    "growing lora beyond memory": _of_lora(
        _LORA, overrides=(*_DOUBLE, "adaptive_batching.grow_beyond_memory=True", "micro_batch_size=2")
    ),
    "growing dpo": _of_dpo(overrides=_DOUBLE),
    "growing by noise": Kind(_FULL, overrides=("batch_increase_function._component_=same_losses.follows_noise",)),
    "split full": Kind(_FULL, overrides=("micro_batch_size=1",)),
    "split lora": _of_lora(_LORA, overrides=("micro_batch_size=2", "batch_size=8")),
    "split dpo": _of_dpo(overrides=("micro_batch_size=2",)),
    "split distillation": _of_lora(_KD, overrides=(*_TEACHER, "micro_batch_size=2")),
    "split packed": Kind(_FULL, overrides=("dataset.packed=True", "micro_batch_size=1")),
    "probed full": Kind(_FULL, overrides=(*_PROBE, *_DOUBLE)),
    "probed lora, micro-batches by length": _of_lora(_LORA, overrides=(*_PROBE, "micro_batch_size=auto")),
    "recovered off": Kind(_FULL, fails_at=5),
    "recovered lora": _of_lora(_LORA, overrides=_DOUBLE, fails_at=17),
    "recovered dpo": _of_dpo(overrides=("micro_batch_size=4",), fails_at=9),
    "validated": Kind(_FULL, overrides=(*_VALIDATE, "micro_batch_size=2")),
    "validated, recovered": Kind(_FULL, overrides=_VALIDATE, fails_at=2, with_gradients=False),
    "resumed full": Kind(_FULL, overrides=(*_DOUBLE, "epochs=3"), resumes=(_EPOCH_1,)),
    "resumed lora": _of_lora(_LORA, overrides=(*_DOUBLE, "epochs=3", "model.lora_dropout=0.1"), resumes=()),
    "ppo": Kind("ppo_full_finetune_single_device", "ppo"),
    "ppo growing": Kind("ppo_full_finetune_single_device", "ppo", _DOUBLE),
    "ppo, a rollout recovered": Kind(
        "ppo_full_finetune_single_device", "ppo", _POLICY, fails_at=9, with_gradients=False
    ),
    "ppo, a step recovered": Kind("ppo_full_finetune_single_device", "ppo", _POLICY, fails_at=9, with_gradients=True),
    "ranks full growing": Kind("full_finetune_distributed", overrides=_DOUBLE, ranks=2),
    "ranks lora split": _of_lora("lora_finetune_distributed", overrides=("micro_batch_size=2", *_PROBE), ranks=2),
    "ranks full recovered": Kind("full_finetune_distributed", overrides=("micro_batch_size=4",), fails_at=7, ranks=2),
    "ranks full validated, recovered": Kind(
        "full_finetune_distributed", overrides=_VALIDATE, fails_at=2, with_gradients=False, ranks=2
    ),
    "trainer off": Loop(trainer),
    "trainer auto": Loop(partial(trainer, micro_batch_size="auto")),
    "trainer split": Loop(partial(trainer, micro_batch_size=3)),
    "trainer recovered": Loop(partial(trainer, most_tokens=60, micro_batch_size=8)),
    "trainer growing": Loop(
        partial(trainer, batch_increase_function={"_component_": "adaptive_batching.growth.step"}, micro_batch_size=6)
    ),
    "trainer evaluated, recovered": Loop(evaluation),
    "trainer sft recovered": Loop(partial(trainer, kind="SFT", most_tokens=130, micro_batch_size=8)),
    "trainer dpo recovered": Loop(partial(trainer, kind="DPO", most_tokens=130, micro_batch_size=8)),
    **{
        f"trainer ranks {name}": Loop(partial(trainer_on_ranks, name=f"{name} llama"), ranks=2)
        for name in ("ddp parts", "ddp short", "ddp evaluated", "fsdp short", "fsdp growing")
    },
    "loop whole": Loop(plain_loop),
    "loop split": Loop(partial(plain_loop, max_tokens=64)),
    "loop recovered": Loop(partial(plain_loop, recovers=True)),
    **{
        f"loop ranks {name}": Loop(partial(plain_loop_on_ranks, name=name), ranks=2)
        for kind in ("ddp", "fsdp2")
        for name in (f"{kind}, in parts", f"{kind}, forward on one", f"{kind}, backward on one")
    },
}

plan: dict[str, int | None] = {"fails_at": None, "with_gradients": None, "calls": 0, "ends_at": None}


def grows_until_cut(every: int = 1) -> Callable[..., int]:
    """Double the batch, and end the run before an epoch if that is planned."""

    def grow(epoch: int, current_batch_size: int, state: object) -> int:
        if epoch == plan["ends_at"]:
            raise RuntimeError("the power went out")
        return current_batch_size if epoch else 0

    return grow


def follows_noise(every: int = 1) -> object:
    from adaptive_batching import growth

    return growth.gradient_noise_scale()


def model(builder: str, **arguments: Any) -> nn.Module:
    """Build a model of llama2, whose second layer runs out of memory in one call, with more than one sample."""
    from torchtune.models import llama2

    made: Any = getattr(llama2, builder)(**arguments)

    def fail(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if plan["with_gradients"] not in (None, torch.is_grad_enabled()):
            return
        plan["calls"] = calls = (plan["calls"] or 0) + 1
        is_first = int(os.environ.get("RANK", 0)) == 0
        if plan["fails_at"] is not None and calls >= plan["fails_at"] and is_first and len(inputs[0]) > 1:
            plan["fails_at"] = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    made.layers[1].register_forward_pre_hook(fail)
    return made  # type: ignore[no-any-return]


full, lora = partial(model, "llama2"), partial(model, "lora_llama2")


def settings_of(kind: Kind, inputs: Path, output_dir: Path) -> list[str]:
    """Return what the command line sets."""
    name = "lora" if kind.config.startswith("lora") else "full"
    settings = {
        "data_dir": inputs, "output_dir": output_dir, "dataset.split": "train[:50]", "tokenizer.max_seq_len": 64,
        "batch_size": 4, "epochs": 2, "use_maximum_batch_size": False, "batch_increase_function": "null",
        "lr_scheduler.num_warmup_steps": 5, "model._component_": f"same_losses.{name}",
        **{f"model.{key}": value for key, value in SMALL.items()},
        **dict(override.split("=", 1) for override in kind.overrides),
    }  # fmt: skip
    function = "batch_increase_function._component_"
    if kind.resumes is not None:
        settings[function] = "same_losses.grows_until_cut"
    if function in settings:
        del settings["batch_increase_function"]
    return [f"{key}={value}" for key, value in settings.items()]


def run(kind: Kind, inputs: Path, output_dir: Path) -> dict[str, Any]:
    """Run a recipe of the tree that lies in the working directory, and return what it left behind."""
    recipe = importlib.import_module(f"recipes.{kind.recipe}")
    if kind.config == "ppo":
        from tests.conftest import ARCHITECTURE
        from tests.support.ppo import config_of, save_reward_model

        ARCHITECTURE.update(SMALL)  # of the model in the inputs; those of tests have had other sizes
        save_reward_model(inputs)
        config, settings = output_dir / "config.yaml", []
        overrides = OmegaConf.from_dotlist([*kind.overrides])
        OmegaConf.save(OmegaConf.merge(config_of(inputs, output_dir), overrides), config)
    else:
        config = Path("recipes/configs/quickstart") / f"{kind.config}.yaml"
        settings = settings_of(kind, inputs, output_dir)
    plan.update(fails_at=kind.fails_at, with_gradients=kind.with_gradients, calls=0)
    first = [] if kind.resumes is None else [2]
    for ends_at in [*first, None]:
        plan["ends_at"] = ends_at
        more = [] if ends_at or kind.resumes is None else ["resume_from_checkpoint=True", *kind.resumes]
        sys.argv = [kind.recipe, "--config", str(config), *settings, *more]
        try:
            recipe.recipe_main()
        except SystemExit as end:
            if end.code and not (ends_at and "the power went out" in str(end.code)):
                raise
    assert not plan["fails_at"] or int(os.environ.get("RANK", 0)), "memory did not run out"
    return stored_probe_in(output_dir)


def stored_probe_in(output_dir: Path) -> dict[str, Any]:
    """Return the metrics of every step without timings, and a sum for each saved weight."""
    from safetensors.torch import load_file

    lines = [line for log in sorted((output_dir / "logs").glob("*.txt")) for line in log.open()]
    values = [line.split("|", 1)[1].replace("out_of_memory_recoveries", "oom_retries") for line in lines]
    steps = [re.findall(r"(\w+?)(?:_samples)?:([^\s,]+)", each) for each in values]  # as earlier commits named them
    sums = {
        f"{path.parent.name}/{path.name}/{name}": weight.double().sum().item()
        for path in sorted(output_dir.rglob("*model*.safetensors"))
        for name, weight in load_file(path).items()
    }
    timed = ("tokens_per_second", "time", "peak_memory")
    return {"steps": [[pair for pair in step if not pair[0].startswith(timed)] for step in steps], "weights": sums}


def run_here(names: list[str], inputs: Path, directory: Path) -> None:
    """Run kinds in forks of this process, and on ranks in this very process.

    A probe does not settle for what is large enough, which depends on the machine's speed.
    """
    room = "_step" if importlib.util.find_spec("adaptive_batching._step") else "_micro_batches"  # of earlier commits
    times = importlib.import_module(f"adaptive_batching.{room}.forward_cost").ForwardTimes
    for name in names:
        output_dir = directory / re.sub(r"\W+", "_", name)
        output_dir.mkdir(parents=True, exist_ok=True)
        kind = KINDS[name]
        child = 0 if kind.ranks > 1 else os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        rank = os.environ.get("RANK", "0")
        with (output_dir / f"output_{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        with mock.patch.object(times, "enough", lambda self: None):
            found = kind.train(output_dir) if isinstance(kind, Loop) else run(kind, inputs, output_dir)
        if rank == "0":
            (output_dir / "found.json").write_text(json.dumps(found))
        os._exit(0)


def in_tree(tree: Path, names: list[str], inputs: Path, directory: Path) -> None:
    """Run kinds with the recipes of a tree, and with this file, which the tree may lack."""
    alone_here = directory.parent / "kinds"
    alone_here.mkdir(exist_ok=True)
    script = shutil.copy(__file__, alone_here)
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{alone_here}", "OMP_NUM_THREADS": "1"}
    environment["HF_DATASETS_CACHE"] = str(inputs / "datasets")
    here = [str(script), "--here", str(inputs), str(directory)]
    alone = [name for name in names if KINDS[name].ranks == 1]
    subprocess.run([sys.executable, *here, *alone], cwd=tree, env=environment, check=True)
    for name in set(names) - set(alone):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(KINDS[name].ranks)]
        subprocess.run([sys.executable, *launch, *here, name], cwd=tree, env=environment, check=False)


def make_inputs(directory: Path) -> Path:
    from adaptive_batching._torchtune.cli.quickstart import Architecture, build, build_model, save_checkpoint

    small = Architecture(**SMALL)
    build(directory, architecture=small)
    save_checkpoint(build_model(small, seed=1), directory / "teacher", small)
    return directory


def main(commit: str, words: list[str]) -> dict[str, Any]:
    """Run all kinds, or those whose names contain a word, in this tree and in a commit's."""
    root = Path(__file__).parents[2]
    names = [name for name in KINDS if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "there"
        subprocess.run(["git", "worktree", "add", "--detach", str(there), commit], cwd=root, check=True)
        try:
            inputs = make_inputs(Path(folder) / "inputs")
            for tree, side in ((root, "ours"), (there, "theirs")):
                in_tree(tree, names, inputs, Path(folder) / side)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=root, check=True)
        different = [name for name in names if not same(Path(folder), re.sub(r"\W+", "_", name), name)]
        if different:
            shutil.copytree(folder, root / "outputs" / "same_losses", dirs_exist_ok=True)
    return {"runs": len(names), "equal": len(names) - len(different), "different": different}


def same(folder: Path, directory: str, name: str) -> bool:
    """Compare one run, and print what differs first."""
    found = []
    for side in ("ours", "theirs"):
        path = folder / side / directory / "found.json"
        if not path.exists():
            last = [line for log in path.parent.glob("output_*.txt") for line in log.read_text().splitlines()[-3:]]
            print(f"{name}: {side} ended early: {last}")
            return False
        found.append(json.loads(path.read_text()))
    ours, theirs = found
    pairs = list(zip(ours["steps"], theirs["steps"], strict=False))
    at = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
    equal = ours == theirs and bool(ours["steps"]) and bool(ours["weights"])
    told = "" if at is None else f", first in step {at}: {pairs[at]}"
    print(
        f"{name}: {len(ours['steps'])} steps, {len(ours['weights'])} weights, {'same' if equal else 'different'}{told}"
    )
    return equal


if __name__ == "__main__":
    sys.modules["same_losses"] = sys.modules["__main__"]
    if sys.argv[1] == "--here":
        run_here(sys.argv[4:], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(main(sys.argv[1], sys.argv[2:])))
