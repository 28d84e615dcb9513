"""Runs of recipes on the ranks of one launch, one after the other; what they leave behind is tested afterwards.

    torchrun --nproc_per_node 2 tests/integration/two_ranks.py <inputs> <directory> <which>

Starting two processes takes longer than any of these runs, so those that belong together share them: ``which`` is a key
of :data:`LAUNCHES`. Each run gets a directory of its own, with ``error_<rank>.txt`` where it ended with an error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torchtune import training
from torchtune.modules.peft import LoRALinear
from torchtune.training import _distributed
from torchtune.training.checkpointing import DistributedCheckpointer

from adaptive_batching._growth.increase import GrowthState, IncreaseFunction
from adaptive_batching._memory import CpuMeter, _status
from adaptive_batching._ranks import agree
from adaptive_batching._torchtune import cutting, many_devices, session
from adaptive_batching._torchtune.loop import TrainingLoop
from adaptive_batching.torchtune import accept_configs_of_torchao, load_stock
from tests.conftest import ARCHITECTURE, ROOT, all_that_fits
from tests.integration.faults import CollectivesThatFail, disarm, plan
from tests.integration.one_target import NOISE
from tests.support.device_steps import noted_steps
from tests.support.overrides import SGD, TEACHER, VALIDATE

REAL_LIMITS = (20, 40, 60, 100, 150, 200, 300, 400)
RANK = int(os.environ.get("RANK", 0))
MIB = 2**20
TIMEOUT = timedelta(seconds=60)  # what hangs is to fail fast


class LossThatFailsOnOneRank(nn.CrossEntropyLoss):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            raise ZeroDivisionError("this rank has a bug")
        return super().forward(logits, labels)


def adds_what_its_rank_says(epoch: int, current_batch_size: int) -> int:
    return 2 + 2 * RANK if epoch else 0


fail_at_epoch: float | None = None


def doubles_until_told_to_fail(epoch: int, current_batch_size: int, state: GrowthState) -> int:
    if epoch == fail_at_epoch:
        raise RuntimeError("the power went out")
    return current_batch_size if epoch else 0


def factory(every: int = 1, rankwise: bool = False) -> IncreaseFunction:
    return adds_what_its_rank_says if rankwise else doubles_until_told_to_fail


@contextlib.contextmanager
def in_the_group_of_this_launch(*modules: Any) -> Iterator[None]:
    """Recipes make and leave their process group; these share one."""
    names = ("init_process_group", "destroy_process_group")
    replaced = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, _ in replaced:
        setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


@contextlib.contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Work around what keeps stock's distributed recipes from running on the cpu."""
    names = ("get_memory_stats", "log_memory_stats", "cleanup_before_training")
    replaced = {name: getattr(training, name) for name in names}
    for name in names:
        setattr(training, name, lambda *args, **kwargs: {})
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(training, name, function)


@contextlib.contextmanager
def offloading_without_pinned_memory() -> Iterator[None]:
    """Memory is pinned for an accelerator; the rest of FSDP's offloading works without one."""
    policy = _distributed.CPUOffloadPolicy
    _distributed.CPUOffloadPolicy = partial(policy, pin_memory=False)
    try:
        yield
    finally:
        _distributed.CPUOffloadPolicy = policy


def same_everywhere(self: LoRALinear) -> None:
    """Adapters that one device and many start with alike; their random numbers are others."""
    nn.init.constant_(self.lora_a.weight, 0.02)
    nn.init.constant_(self.lora_b.weight, 0.01)


def wait_for_checkpoints(output_dir: Path) -> None:
    """Wait until asynchronous checkpoints are complete, as a process does before it ends."""
    end = time.monotonic() + 60
    while any(not (folder / ".metadata").exists() for folder in output_dir.glob("dist_*")):
        assert time.monotonic() < end, f"a checkpoint in {output_dir} was never completed"
        time.sleep(0.02)


class Runner:
    def __init__(self, inputs: Path, directory: Path) -> None:
        self.inputs = inputs
        self.directory = directory

    def __call__(self, kind: str, name: str, *overrides: str, stock: bool = False, **where: Any) -> None:
        """Run a recipe; ``where`` says what runs out of memory, on the ranks ``on``.

        ``in_training`` is the number of the forward, from 1, that training begins with.
        """
        on, in_training = where.pop("on", [RANK]), where.pop("in_training", None)
        collectives: CollectivesThatFail | None = where.pop("collectives", None)
        disarm()
        if where:
            # the first forward is the one that records the collectives
            plan.update({"call": 2, "times": 1, **where} if RANK in on else {"layer": where.get("layer", 0)})
        if in_training is not None:
            plan["call"] = 10**6

        def begin(loop: TrainingLoop) -> None:
            if in_training is not None:
                plan["call"] = plan["calls"] + in_training
            if collectives is not None and RANK in on:
                collectives.begin()
            train(loop)

        train = TrainingLoop.run
        module, config, added = OTHERS.get(kind, (f"{kind}_finetune_distributed", kind, ()))
        overrides = (*added, *overrides)
        cfg = ROOT / "recipes" / "configs" / "quickstart" / f"{config}_single_device.yaml"
        defaults = [
            f"data_dir={self.inputs}", f"output_dir={self.directory / name}", "dataset.split=train[:48]",
            "tokenizer.max_seq_len=64", "batch_size=4", "epochs=1", "use_maximum_batch_size=False",
            "batch_increase_function=null", "lr_scheduler.num_warmup_steps=2",
            *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
        ]  # fmt: skip
        keys = {override.split("=")[0] for override in overrides}
        defaults = [default for default in defaults if default.split("=")[0] not in keys]
        recipe = load_stock(module) if stock else importlib.import_module(f"recipes.{module}")
        sys.argv = [module, "--config", str(cfg), *defaults, *overrides]
        if RANK == 0:
            print(f"RUN {name}", flush=True)
        try:
            with (
                in_the_group_of_this_launch(load_stock(module)),
                stock_on_cpu() if stock else contextlib.nullcontext(),
                mock.patch.object(TrainingLoop, "run", begin),
                collectives or contextlib.nullcontext(),
            ):
                recipe.recipe_main()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                (self.directory / name).mkdir(exist_ok=True)
                (self.directory / name / f"error_{RANK}.txt").write_text(f"{error}\n{traceback.format_exc()}")
        wait_for_checkpoints(self.directory / name)


def model(kind: str) -> str:
    return f"model._component_=tests.integration.faults.{kind}_model"


ACCUMULATE = "gradient_accumulation_steps=2"
GROW = ["batch_increase_function._component_=tests.integration.two_ranks.factory", "epochs=3"]
KINDS = ("full", "lora")
OUT_IN_VALIDATION: dict[str, Any] = {"where": "forward", "without_gradients": True, "fits": 4, "layer": 1}


def recoverable(kind: str) -> list[str]:
    """A model that can run out of memory, and steps of two batches."""
    return [*SGD, model(kind), ACCUMULATE]


def runs_as_stock(run: Runner) -> None:
    """Ours with all fields unset, and stock's."""
    for kind in KINDS:
        run(kind, f"{kind}_stock", "clip_grad_norm=1.0", ACCUMULATE, stock=True)
        run(kind, f"{kind}_off", "clip_grad_norm=1.0", ACCUMULATE)
    validate = ["clip_grad_norm=1.0", ACCUMULATE, *VALIDATE, "run_val_every_n_steps=1"]
    run("full", "validated", *validate, "batch_size_val=3", "fsdp_reshard_after_forward=False")
    run("full", "validated_again", *validate, "batch_size_val=6", model("full"), **OUT_IN_VALIDATION, on=[1])
    in_backward = ["optimizer_in_bwd=True", "clip_grad_norm=null"]
    run("full", "in_backward_stock", *in_backward, stock=True)
    run("full", "in_backward_off", *in_backward)
    run("full", "in_backward_probe", *in_backward, "use_maximum_batch_size=True")
    plan_of_layers = "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
    tensor_parallel = ["tensor_parallel_dim=2", plan_of_layers, "clip_grad_norm=null"]  # stock cannot clip there
    run("full", "tensor_parallel_stock", *tensor_parallel, stock=True)
    run("full", "tensor_parallel_off", *tensor_parallel)


def runs_that_are_cut(run: Runner) -> None:
    """By a number, by length, and by running out of memory."""
    for kind in KINDS:
        common = recoverable(kind)
        run(kind, f"{kind}_whole", *common)
        for size in ("1", "2"):
            run(kind, f"{kind}_cut_{size}", *common, f"micro_batch_size={size}")
        with mock.patch.object(cutting, "FIRST_FORWARD_COST", 16):  # so that these few steps are cut
            run(kind, f"{kind}_cut_auto", *common, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB")
        for where in ("forward", "backward"):
            for on in ([0], [1], [0, 1]):
                name = f"{kind}_{where}_{''.join(map(str, on))}"
                run(kind, name, *common, where=where, on=on, layer=RANK if len(on) == 2 else 1, call=4)
        run(kind, f"{kind}_first", *common, where="backward", on=[1], layer=1, call=2)
        run(kind, f"{kind}_twice", *common, where="forward", on=[0], layer=1, call=3, times=2)


def runs_that_recover(run: Runner) -> None:
    """With checkpointing and with parameters on the host; and those that cannot, or must not."""
    checkpointing = [*SGD, model("full"), "enable_activation_checkpointing=True"]
    run("full", "checkpointing_whole", *checkpointing)
    run("full", "checkpointing_forward", *checkpointing, where="forward", on=[1], layer=1, call=3)
    run("full", "checkpointing_backward", *checkpointing, where="backward", on=[0], call=3)
    run("full", "hopeless", model("full"), "micro_batch_size=4", where="forward", on=[1], times=10**6)
    run("full", "not_to_recover", model("full"), "adaptive_batching.recover_from_oom=False", where="forward", on=[0, 1])
    common = recoverable("full")
    run("full", "full_whole", *common)
    with offloading_without_pinned_memory():
        run("full", "offload", *common, "fsdp_cpu_offload=True")
        run("full", "offload_backward", *common, "fsdp_cpu_offload=True", where="backward", on=[1], call=4)


def runs_with_noise(run: Runner) -> None:
    """The gradient noise scale, measured by both ranks."""
    for kind in KINDS:
        run(kind, f"{kind}_noise", *NOISE, *ONE_TARGET, "micro_batch_size=3")
    run("full", "full_noise_auto", *NOISE, *ONE_TARGET, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB")
    by_noise = ["batch_increase_function._component_=adaptive_batching.growth.gradient_noise_scale",
                "~batch_increase_function.every", "batch_increase_function.multiplier=4",
                "adaptive_batching.noise_scale_every=1", "epochs=3",
                "adaptive_batching.increase_every=0.5", "adaptive_batching.lr_scaling=auto"]  # fmt: skip
    run("full", "by_noise", *by_noise, "adaptive_batching.max_batch_size=12")


def runs_with_noise_by_length(run: Runner) -> None:
    """As in the full recipe above."""
    run("lora", "lora_noise_auto", *NOISE, *ONE_TARGET, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB")


ONE_TARGET = ["batch_size=5", "dataset._component_=tests.integration.one_target.OneTarget"]


def runs_that_grow(run: Runner) -> None:
    """Together, and on from a checkpoint."""
    global fail_at_epoch
    rankwise = ["batch_increase_function.rankwise=True", "adaptive_batching.max_batch_size=12"]
    run("full", "agreed", *GROW, *rankwise)
    keep = ["adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=4", "batch_size=2"]
    run("full", "kept", *SGD, *GROW, *keep, "adaptive_batching.max_batch_size=8")
    run("full", "constant", *SGD, *GROW, *keep, "adaptive_batching.max_batch_size=2")

    resume = [*GROW, "use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB"]
    run("full", "uninterrupted", *resume)
    fail_at_epoch = 1
    run("full", "resumed", *resume)
    fail_at_epoch = None
    files = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.safetensors]"
    run("full", "resumed", *resume, "resume_from_checkpoint=True", files)

    save_async = [*GROW, "adaptive_batching.max_batch_size=16", "enable_async_checkpointing=True"]
    run("full", "async", *save_async)
    fail_at_epoch = 2
    run("full", "async_resumed", *save_async)
    fail_at_epoch = None
    sees_none = mock.patch.object(DistributedCheckpointer, "_get_latest_intermediate_checkpoint", lambda self: None)
    with sees_none if RANK == 1 else contextlib.nullcontext():  # as on a disk that is shared, a while
        run("full", "async_resumed", *save_async, "resume_from_checkpoint=True")

    run_in_two(run, "full", "adaptive_batching.noise_scale_every=2")
    run_in_two(run, "full", "enable_async_checkpointing=True", "save_every_n_steps=1", name="async_steps")


def run_in_two(run: Runner, kind: str, *added: str, name: str = "") -> None:
    """Run as a whole, and cut off within the second epoch, to go on from a checkpoint within it."""
    global fail_at_epoch
    name = name or f"{kind}_steps"
    every = ["adaptive_batching.increase_every=0.5", "adaptive_batching.max_batch_size=8", "save_every_n_steps=5"]
    common = [*GROW[:-1], "epochs=2", *every, *added]
    run(kind, f"{name}_whole", *common)
    fail_at_epoch = 1.5
    run(kind, name, *common)
    fail_at_epoch = None
    run(kind, name, *common, "resume_from_checkpoint=True")


def runs_of_other_recipes(run: Runner) -> None:
    """Against the model without adapters, or a second one, which is sharded on its own; and with rounded weights."""
    for kind in OTHERS:
        common = [*SGD, ACCUMULATE, "tokenizer.max_seq_len=96", *(["loss.beta=2.0"] if "dpo" in kind else [])]
        run(kind, f"{kind}_stock", *common, stock=True)
        run(kind, f"{kind}_off", *common)
        common.append(model("full" if kind in ("full_dpo", "qat") else "lora"))
        if kind in ("kd", "qat"):
            validate = [*common, *VALIDATE, "run_val_every_n_steps=1"]
            run(kind, f"{kind}_validated", *validate, "batch_size_val=1")
            run(kind, f"{kind}_validated_again", *validate, "batch_size_val=6", **OUT_IN_VALIDATION, on=[0])
        if kind == "kd":  # whose gradient stock divides by the tokens twice
            run(kind, f"{kind}_whole", *common, "micro_batch_size=4")
        with mock.patch.object(cutting, "FIRST_FORWARD_COST", 16):  # so that these few steps are cut
            run(kind, f"{kind}_auto", *common, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB")
        for where, on in (("forward", 0), ("backward", 1)):
            run(kind, f"{kind}_{where}", *common, where=where, on=[on], layer=1, call=4)
        if kind.endswith("dpo"):
            frozen: dict[str, Any] = {"without_gradients": True, "fits": 5, "layer": 1, "call": 4}
            run(kind, f"{kind}_frozen", *common, where="forward", on=[1], **frozen)


def runs_of_other_recipes_that_resume(run: Runner) -> None:
    """Those whose stock checkpoints hold no state of the batch, on from a checkpoint."""
    global fail_at_epoch
    growing = [*SGD, *GROW, "use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB"]
    run("lora_dpo", "lora_dpo_uninterrupted", *growing)
    fail_at_epoch = 1
    run("lora_dpo", "lora_dpo_resumed", *growing)
    fail_at_epoch = None
    run("lora_dpo", "lora_dpo_resumed", *growing, "resume_from_checkpoint=True")
    for kind in IN_TWO:
        run_in_two(run, kind, *([] if kind in ("full_dpo", "qat") else ["model.lora_dropout=0.1"]))


IN_TWO = ("lora", "lora_dpo", "full_dpo", "kd", "qat", "qat_lora")
NO_ADAPTERS = (
    "model._component_=torchtune.models.llama2.llama2", "~model.lora_attn_modules", "~model.apply_lora_to_mlp",
    "~model.apply_lora_to_output", "~model.lora_rank", "~model.lora_alpha", "~model.lora_dropout",
    "clip_grad_norm=1.0",
)  # fmt: skip
REFERENCE = (
    "ref_checkpointer._component_=torchtune.training.FullModelHFCheckpointer",
    "ref_checkpointer.checkpoint_dir=${data_dir}/model", "ref_checkpointer.checkpoint_files=[model.safetensors]",
    "ref_checkpointer.output_dir=${output_dir}", "ref_checkpointer.model_type=LLAMA2",
)  # fmt: skip
QUANTIZER = (
    "quantizer._component_=torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "quantizer.groupsize=32",
)  # fmt: skip
OTHERS: dict[str, tuple[str, str, Sequence[str]]] = {
    "lora_dpo": ("lora_dpo_distributed", "lora_dpo", ()),
    "full_dpo": ("full_dpo_distributed", "lora_dpo", (*NO_ADAPTERS, *REFERENCE)),
    "kd": ("knowledge_distillation_distributed", "lora", TEACHER),
    "qat": ("qat_distributed", "full", (*QUANTIZER, "fake_quant_after_n_steps=1")),
    "qat_lora": ("qat_lora_finetune_distributed", "lora", QUANTIZER),
}
"""Recipe, config, and what is added to the config for each kind of run besides supervised fine-tuning."""


def runs_on_devices(run: Runner) -> None:
    """Every recipe over NCCL: probed, grown, validated, saved within an epoch and resumed; what QAT's steps ask for."""
    for kind in (*KINDS, *OTHERS):
        validate = [] if kind.endswith("dpo") else [*VALIDATE, "run_val_every_n_steps=4"]
        run_in_two(run, kind, *ON_DEVICE, *validate, "use_maximum_batch_size=True")
    for name, fields in {"stock": [], "off": [], "probed": ["use_maximum_batch_size=True"]}.items():
        common = [*ON_DEVICE, "dataset.split=train[:160]", "adaptive_batching.max_batch_size=4"]
        run_noted(run, "qat", f"qat_{name}", *common, *fields, stock=name == "stock")


def runs_of_many_steps(run: Runner) -> None:
    """A hundred steps of every recipe over NCCL."""
    for kind in (*KINDS, *OTHERS):
        run_noted(run, kind, kind, *ON_DEVICE, "dataset.split=train[:200]", "batch_size=1")


def run_noted(run: Runner, kind: str, name: str, *overrides: str, stock: bool = False) -> None:
    """Run, and leave in ``ends.json`` what the device was asked for up to the end of each step."""
    with noted_steps() as ends:
        run(kind, name, *overrides, stock=stock)
    if RANK == 0:
        (run.directory / name / "ends.json").write_text(json.dumps([asdict(end) for end in ends]))


ON_DEVICE = ("device=cuda", "dtype=bf16")


def runs_within_memory(run: Runner) -> None:
    """Settings of runs that probe or explore under a real limit."""
    explore = ["micro_batch_size=explore", "adaptive_batching.memory_limit=8GiB"]
    run("full", "explored", *explore, "tokenizer.max_seq_len=256")
    CpuMeter().release()
    limit = f"adaptive_batching.memory_limit={CpuMeter().used_bytes() + 200 * MIB}"
    run("full", "square", "micro_batch_size=auto", limit, "model.attn_dropout=0.1", "tokenizer.max_seq_len=512",
        "dataset.split=train[:96]", "batch_size=48")  # fmt: skip

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    few = ["dataset.split=train[:400]", "tokenizer.max_seq_len=256", "max_steps_per_epoch=1"]
    probe = [*few, "use_maximum_batch_size=True", "adaptive_batching.round_to_power_of_two=False", "batch_size=1"]
    CpuMeter().release()
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + 300 * MIB, limits[1]))
    run("full", "unequal_memory", *probe, "adaptive_batching.memory_limit=4GiB")
    one = [*SGD, *few, "max_steps_per_epoch=2", "batch_size=128", "adaptive_batching.memory_limit=8GiB"]
    run("full", "real_limit", *one)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    run("full", "real_no_limit", *one)


def runs_of_short_samples(run: Runner) -> None:
    """Runs of a model that gathers its output layer for each chunk of tokens, and what reads so few of them."""
    in_chunks = ["custom_sharded_layers=[tok_embeddings,output]"]
    run("full", "stock", *in_chunks, "clip_grad_norm=1.0", stock=True)
    run("full", "off", *in_chunks, "clip_grad_norm=1.0")

    short = [*SGD, model("full"), "gradient_accumulation_steps=2", "batch_size=8"]
    short += ["dataset._component_=tests.integration.short_samples.ShortSamples"]
    run("full", "whole", *short, "loss._component_=tests.integration.faults.WholeCrossEntropy")
    auto = ["micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB"]
    with mock.patch.object(cutting, "FIRST_FORWARD_COST", 4):  # so that these few tokens are cut
        for name, ways in {"8": ["micro_batch_size=8"], "2": ["micro_batch_size=2"], "auto": auto}.items():
            common = [*short, *in_chunks, *ways]
            run("full", f"cut_{name}", *common)
            for where, rank in [("forward", 0), ("backward", 1)]:
                run("full", f"cut_{name}_{where}", *common, where=where, on=[rank], layer=1, in_training=2, fits=1)

    with mock.patch.object(agree, "_start_gloo", side_effect=RuntimeError("no host of that name")):
        run("full", "no_gloo", *in_chunks, "clip_grad_norm=1.0")
        run("full", "no_gloo_but_asked_for", "use_maximum_batch_size=True")
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("a group was made")):
        run("full", "no_group", *in_chunks, "clip_grad_norm=1.0", "adaptive_batching.recover_from_oom=False")


def runs_of_failing_collectives(run: Runner, cases: Sequence[FailingCollective]) -> None:
    """Memory runs out at moments of collectives of each kind that a rank recovers from."""
    run("full", "whole", *SGD, ACCUMULATE)
    for case in cases:
        if case[1] in KNOWN:
            run_with_failing_collective(run, *case)


def run_with_failing_collective(run: Runner, kind: str, moment: str, number: int, on: list[int]) -> None:
    failing = CollectivesThatFail(kind, moment, number)
    run("full", name_of(kind, moment, number, on), *SGD, ACCUMULATE, collectives=failing, on=on)


def run_in_a_process_of_its_own(number: int, run: Callable[[], None]) -> None:
    """Run what ends on one rank by what it does on another; before this process has a group or threads."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    addresses = PrefixStore(f"process_{number}", store)  # not those of the process before
    dist.init_process_group("gloo", store=addresses, rank=RANK, world_size=2, timeout=TIMEOUT)
    run()
    sys.exit()


def name_of(kind: str, moment: str, number: int, on: Sequence[int]) -> str:
    return f"{kind}_{moment}_{number}_{''.join(map(str, on))}"


FailingCollective = tuple[str, str, int, list[int]]
KNOWN, UNKNOWN = ("before", "inside", "after"), ("issued", "waiting", "lost")
"""Moments at which a rank knows whether the others get what they wait for, and those at which it does not."""
AGAIN = ("draining", "recovering")
"""Moments of recovery itself"""
ALL_FAILING_COLLECTIVES = [
    (kind, moment, number, on)
    for kind in ("gather", "scatter")
    for moment in (*KNOWN, *UNKNOWN)
    for number in range(1, 8)
    for on in ([0], [1], [0, 1])
] + [("gather", moment, number, on) for moment in AGAIN for number in range(1, 8) for on in ([0], [1], [0, 1])]
ON = {1: [1], 4: [0, 1], 6: [0]}
FAILING_COLLECTIVES = [
    (kind, moment, number, ON[number])
    for kind in ("gather", "scatter")
    for moment, numbers in {**dict.fromkeys(KNOWN, tuple(ON)), "issued": (1,), "waiting": (6,), "lost": (1,)}.items()
    for number in numbers
] + [("gather", "draining", 6, [0]), ("scatter", "recovering", 1, [1])]
COLLECTIVES_THAT_FAIL = {
    "failing_collectives": FAILING_COLLECTIVES, "all_failing_collectives": ALL_FAILING_COLLECTIVES
}  # fmt: skip
FEW = ["dataset.split=train[:400]", "tokenizer.max_seq_len=256", "epochs=1"]


def runs_under_a_real_limit(run: Runner, extra_mib: int) -> None:
    """The second rank alone may grow by no more than ``extra_mib`` once its model is set up."""
    probe = ["use_maximum_batch_size=True", "adaptive_batching.round_to_power_of_two=False", "batch_size=1"]
    probe += ["adaptive_batching.memory_limit=8GiB", "max_steps_per_epoch=4"]

    def limited(*arguments: Any, **named: Any) -> Any:
        CpuMeter().release()
        if RANK == 1:
            resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + extra_mib * MIB, -1))
        return many_devices.record_collectives(*arguments, **named)

    for name, overrides in {"fixed": ["batch_size=64"], "probed": probe}.items():
        with mock.patch.object(session, "record_collectives", limited):
            run("full", name, *SGD, *FEW, *overrides)
        resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
        if (run.directory / name / f"error_{RANK}.txt").exists():
            sys.exit(3)  # the other rank may be anywhere: as in a launch of one recipe, the launcher ends it


LAUNCHES: dict[str, Callable[[Runner], None]] = {
    "as_stock": runs_as_stock,
    "cut": runs_that_are_cut,
    "recovery": runs_that_recover,
    "noise": runs_with_noise,
    "noise_by_length": runs_with_noise_by_length,
    "growth": runs_that_grow,
    "others": runs_of_other_recipes,
    "others_resume": runs_of_other_recipes_that_resume,
    "devices": runs_on_devices,
    "devices_level": runs_of_many_steps,
    "memory": runs_within_memory,
    "short_samples": runs_of_short_samples,
    **{which: partial(runs_of_failing_collectives, cases=cases) for which, cases in COLLECTIVES_THAT_FAIL.items()},
    **{f"limit_{extra}": partial(runs_under_a_real_limit, extra_mib=extra) for extra in REAL_LIMITS},
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.modules["tests.integration.two_ranks"] = sys.modules["__main__"]
    LoRALinear.initialize_parameters = same_everywhere
    accept_configs_of_torchao()  # stock's recipe asks for a class by the name that it had
    inputs, directory, which = sys.argv[1:4]
    run = Runner(Path(inputs), Path(directory))
    gc.freeze()  # else each recovery goes through all that torch has made
    with all_that_fits():
        for number, case in enumerate(COLLECTIVES_THAT_FAIL.get(which, []), 1):
            if case[1] not in KNOWN:
                run_in_a_process_of_its_own(number, partial(run_with_failing_collective, run, *case))
        dist.init_process_group("cuda:nccl,cpu:gloo" if which.startswith("devices") else "gloo", timeout=TIMEOUT)
        LAUNCHES[which](run)
    dist.barrier()
    dist.destroy_process_group()
