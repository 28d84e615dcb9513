"""Hold the losses of some fifty kinds of run against those of another commit, bit for bit.

    python -m tests.support.same_losses cba35f9            # all of them, in both trees, on this machine
    python -m tests.support.same_losses HEAD~3 split ppo     # those whose names contain a word

Each run has a process of its own, and the recipes, settings and models of the tests of its tree. It is a real recipe on
real text, Trainer, or a plain loop: with all fields unset, growing, split, probed, recovered from an error, resumed, on
two ranks. What is compared are the metrics of every step, without timings, and the weights. The last line printed is a
JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.conftest import QUICKSTART, ROOT, Run, all_that_fits, small_run, without_pages
from tests.integration import faults
from tests.support import power_cut
from tests.support.overrides import DOUBLE, TEACHER, VALIDATE
from tests.support.ppo import config_of, save_reward_model

Found = dict[str, Any]
"""``steps``: what each of them logged; ``weights``: those at the end."""

_PROBE = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB", "adaptive_batching.max_batch_size=16"]
_VALIDATE = [*VALIDATE, "run_val_every_n_steps=3"]
_RECOVER = ["adaptive_batching.recover_from_oom=True"]  # here, as the other tree has this file alone
_EPOCH_1 = "checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]"


def recipe(
    folder: Path, inputs: Path, *, name: str, overrides: Sequence[str] = (), fails_at: int | None = None,
    validates: bool = False, resumes: Sequence[str] | None = None,
) -> Found:  # fmt: skip
    """Run a recipe, or one that is cut off before its third epoch and ``resumes`` with these settings.

    Args:
        fails_at: The forward of the second layer, on the first rank, that runs out of memory, of more than one sample.
        validates: Such forwards are counted where no gradients are computed, as in a validation or a rollout.
    """
    fails = fails_at is not None and os.environ.get("RANK", "0") == "0"
    faults.disarm()
    faults.plan.update(layer=1, fits=1, call=fails_at or 0, times=int(fails), without_gradients=validates)
    config = folder / "config.yaml"
    kind = "lora" if name.startswith("lora") or "distillation" in name else "full"
    settings: list[str] = []
    if name.startswith("ppo"):
        save_reward_model(inputs)
        changes = ["policy_model._component_=tests.integration.faults.full_model", *overrides]
        OmegaConf.save(OmegaConf.merge(config_of(inputs, folder), OmegaConf.from_dotlist(changes)), config)
    else:
        config = QUICKSTART / f"{'lora_dpo' if 'dpo' in name else kind}_single_device.yaml"
        model = f"model._component_=tests.integration.faults.{kind}_model"
        settings = small_run(inputs, folder, model, *overrides)
    for ends_at in (None,) if resumes is None else (2, None):
        power_cut.fail_at_epoch = ends_at
        again = [] if ends_at or resumes is None else ["resume_from_checkpoint=True", *resumes]
        sys.argv = [name, "--config", str(config), *settings, *again]
        try:
            importlib.import_module(f"recipes.{name}").recipe_main()
        except SystemExit as end:
            if end.code and ends_at is None:  # else it was cut off, and the run that resumes shows where
                raise
    assert not faults.plan["times"], "memory did not run out"
    saved = [(path, load_file(path)) for path in sorted(folder.rglob("*model*.safetensors"))]
    sums = {f"{path}/{key}": value.double().sum().item() for path, weights in saved for key, value in weights.items()}
    steps = [{key: value for key, value in step.items() if "time" not in key} for step in Run(folder).metrics]
    return {"steps": steps, "weights": {name.removeprefix(str(folder)): value for name, value in sums.items()}}


def trainer(folder: Path, inputs: Path, *, kind: str = "", most_tokens: int | None = None, **fields: Any) -> Found:
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
    found = without_words(two_ranks.outcome(made))
    assert (found.get("recoveries", 0) > 0) == (most_tokens is not None)
    return {"steps": found.pop("logged"), "weights": found}


def without_words(found: Found) -> Found:
    """Leave out what was logged, which says how much memory was free."""
    return {key: value for key, value in found.items() if key != "told"}


def evaluation(folder: Path, inputs: Path) -> Found:
    """Evaluate with Trainer, in memory that is too short for most of its batches."""
    from adaptive_batching.transformers import AdaptiveArguments
    from tests.transformers import trainers

    made = trainers.make_trainer(folder, AdaptiveArguments(micro_batch_size="auto"))
    short = trainers.OutOfMemory(made.model, 60, in_training=False)
    found = made.predict(trainers.make_data(21))
    assert short.failures
    step = {"loss": found.metrics["test_loss"], "failures": short.failures}
    return {"steps": [step], "weights": {"logits": found.predictions.tolist()}}


def trainer_on_ranks(folder: Path, inputs: Path, *, name: str) -> Found:
    """Train with Trainer on two ranks, in a run of its tests; memory is short on the second alone."""
    from tests.transformers import two_ranks

    found = without_words(two_ranks.run(name, folder))
    return {"steps": found.pop("logged", [found]), "weights": found}  # an evaluation logs nothing


def plain_loop(folder: Path, inputs: Path, *, max_tokens: int | None = None, recovers: bool = False) -> Found:
    """Take steps of AdaptiveStep, with dropout."""
    from tests.loop import test_step

    model, step = test_step.make(max_tokens=max_tokens, max_grad_norm=0.5, dropout=0.1)
    if recovers:
        test_step.always(model, times=3)
    batches = (test_step.SAMPLES, test_step.texts(4, 11, 6), test_step.texts(12, 29, 20, 8, 8, 2, 17))
    losses = [step(batch).item() for batch in batches]
    assert (step.num_recoveries > 0) == recovers
    weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
    return {"steps": [*losses, model.forwards], "weights": weights}


def plain_loop_on_ranks(folder: Path, inputs: Path, *, name: str) -> Found:
    """Take steps of AdaptiveStep on two ranks, in a case of its tests."""
    from tests.loop import two_ranks

    torch.distributed.init_process_group("gloo")
    found = two_ranks.train(*name.split(", "))
    weights = [weight.tolist() for weight in found["weights"]]
    return {"steps": [found[key] for key in ("losses", "recoveries", "forwards")], "weights": weights}


def of(name: str) -> Callable[..., Callable[[Path, Path], Found]]:
    return partial(partial, recipe, name=name)


_full, _full_on_ranks = of("full_finetune_single_device"), of("full_finetune_distributed")
_lora, _lora_on_ranks = of("lora_finetune_single_device"), of("lora_finetune_distributed")
_dpo, _ppo = of("lora_dpo_single_device"), of("ppo_full_finetune_single_device")
_distilled = of("knowledge_distillation_single_device")
KINDS: dict[str, Callable[[Path, Path], Found]] = {
    "off full": _full(),
    "off full accumulating": _full(overrides=["gradient_accumulation_steps=3"]),
    "off full in backward": _full(overrides=["optimizer_in_bwd=True", "clip_grad_norm=null"]),
    "off lora": _lora(),
    "off dpo": _dpo(),
    "off distillation": _distilled(overrides=TEACHER),
    "growing full": _full(overrides=[*DOUBLE, "adaptive_batching.lr_scaling=sqrt"]),
    "growing full within epochs": _full(overrides=[*DOUBLE, "adaptive_batching.increase_every=0.5"]),
    "growing lora beyond memory": _lora(
        overrides=[*DOUBLE, "adaptive_batching.grow_beyond_memory=True", "micro_batch_size=2"]
    ),
    "growing dpo": _dpo(overrides=DOUBLE),
    "split full": _full(overrides=["micro_batch_size=1"]),
    "split lora": _lora(overrides=["micro_batch_size=2", "batch_size=8"]),
    "split dpo": _dpo(overrides=["micro_batch_size=2"]),
    "split distillation": _distilled(overrides=[*TEACHER, "micro_batch_size=2"]),
    "split packed": _full(overrides=["dataset.packed=True", "micro_batch_size=1"]),
    "probed full": _full(overrides=[*_PROBE, *DOUBLE]),
    "probed lora, micro-batches by length": _lora(overrides=[*_PROBE, "micro_batch_size=auto"]),
    "recovered": _full(overrides=_RECOVER, fails_at=5),
    "recovered lora": _lora(overrides=DOUBLE, fails_at=17),
    "recovered dpo": _dpo(overrides=["micro_batch_size=4"], fails_at=9),
    "validated": _full(overrides=[*_VALIDATE, "micro_batch_size=2"]),
    "validated, recovered": _full(overrides=[*_VALIDATE], fails_at=2, validates=True),
    "resumed full": _full(overrides=[*power_cut.FUNCTION, "epochs=3"], resumes=[_EPOCH_1]),
    "resumed lora": _lora(overrides=[*power_cut.FUNCTION, "epochs=3", "model.lora_dropout=0.1"], resumes=[]),
    "off ppo": _ppo(),
    "ppo growing": _ppo(overrides=DOUBLE),
    "ppo, a rollout recovered": _ppo(overrides=_RECOVER, fails_at=9, validates=True),
    "ppo, a step recovered": _ppo(overrides=_RECOVER, fails_at=9),
    "ranks full growing": _full_on_ranks(overrides=DOUBLE),
    "ranks lora split": _lora_on_ranks(overrides=["micro_batch_size=2", *_PROBE]),
    "ranks full recovered": _full_on_ranks(overrides=["micro_batch_size=4"], fails_at=7),
    "ranks full validated, recovered": _full_on_ranks(overrides=[*_VALIDATE], fails_at=2, validates=True),
    "trainer off": trainer,
    "trainer auto": partial(trainer, micro_batch_size="auto"),
    "trainer split": partial(trainer, micro_batch_size=3),
    "trainer recovered": partial(trainer, most_tokens=60, micro_batch_size=8),
    "trainer growing": partial(
        trainer, batch_increase_function={"_component_": "adaptive_batching.growth.step"}, micro_batch_size=6
    ),
    "trainer evaluated, recovered": evaluation,
    "trainer sft recovered": partial(trainer, kind="SFT", most_tokens=130, micro_batch_size=8),
    "trainer dpo recovered": partial(trainer, kind="DPO", most_tokens=130, micro_batch_size=8),
    **{
        f"trainer ranks {name}": partial(trainer_on_ranks, name=f"{name} llama")
        for name in ("ddp parts", "ddp short", "ddp evaluated", "fsdp short", "fsdp growing")
    },
    "loop whole": plain_loop,
    "loop split": partial(plain_loop, max_tokens=64),
    "loop recovered": partial(plain_loop, recovers=True),
    **{
        f"loop ranks {name}": partial(plain_loop_on_ranks, name=name)
        for kind in ("ddp", "fsdp2")
        for name in (f"{kind}, in parts", f"{kind}, forward on one", f"{kind}, backward on one")
    },
}


def folder_of(name: str, directory: Path) -> Path:
    return directory / re.sub(r"\W+", "_", name)


def run_here(names: list[str], inputs: Path, directory: Path) -> None:
    """Run kinds in forks of this process, and on ranks in this very process."""
    for name in names:
        folder = folder_of(name, directory)
        folder.mkdir(parents=True, exist_ok=True)
        if "ranks" not in name and (child := os.fork()):
            os.waitpid(child, 0)
            continue
        rank = os.environ.get("RANK", "0")
        with (folder / f"output_{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        with all_that_fits(), without_pages():
            found = KINDS[name](folder, inputs)
        if rank == "0":
            (folder / "found.json").write_text(json.dumps(found))
        os._exit(0)


def in_tree(tree: Path, names: list[str], inputs: Path, directory: Path) -> None:
    """Run kinds in a tree, with this file, of which the tree may have another."""
    script = shutil.copy(__file__, directory.parent)
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_DATASETS_CACHE": str(inputs / "datasets")}
    here = [str(script), "--here", str(inputs), str(directory)]
    alone = [name for name in names if "ranks" not in name]
    subprocess.run([sys.executable, *here, *alone], cwd=tree, env=environment, check=True)
    for name in set(names) - set(alone):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        subprocess.run([sys.executable, *launch, *here, name], cwd=tree, env=environment, check=False)


def main(commit: str, words: list[str]) -> dict[str, Any]:
    """Run all kinds, or those whose names contain a word, in this tree and in a commit's."""
    from tests.conftest import make_inputs

    names = [name for name in KINDS if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        there = folder / "there"
        subprocess.run(["git", "worktree", "add", "--detach", str(there), commit], cwd=ROOT, check=True)
        try:
            make_inputs(folder / "inputs")
            for tree, side in ((ROOT, "ours"), (there, "theirs")):
                in_tree(tree, names, folder / "inputs", folder / side)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=ROOT, check=True)
        different = [name for name in names if not same(folder, name)]
        if different:
            shutil.copytree(folder, ROOT / "outputs" / "same_losses", dirs_exist_ok=True)
    return {"runs": len(names), "equal": len(names) - len(different), "different": different}


def same(folder: Path, name: str) -> bool:
    """Compare one run, and print what differs first."""
    found = []
    for side in ("ours", "theirs"):
        path = folder_of(name, folder / side) / "found.json"
        if not path.exists():
            last = [line for log in path.parent.glob("output_*.txt") for line in log.read_text().splitlines()[-3:]]
            print(f"{name}: {side} ended early: {last}")
            return False
        found.append(json.loads(path.read_text()))
    ours, theirs = found
    differ = [f"{a} != {b}" for a, b in zip(ours["steps"], theirs["steps"], strict=False) if a != b]
    equal = ours == theirs and bool(ours["steps"]) and bool(ours["weights"])
    print(f"{name}: {len(ours['steps'])} steps, {'same' if equal else 'different'}", *differ[:1], sep=", ")
    return equal


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        run_here(sys.argv[4:], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(main(sys.argv[1], sys.argv[2:])))
