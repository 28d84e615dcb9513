"""Runs of recipes on two ranks, one after the other in one process group; what they leave behind is tested afterwards.

Starting two processes takes longer than any of these runs, so those that belong together share them: a launch, a key of
:data:`LAUNCHES`. Each run gets a directory of its own, with ``error_<rank>.txt`` where it ended with an error. Within a
run memory may run out once in every step, and not only once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training
from torchtune.modules.peft import LoRALinear
from torchtune.training import _distributed

from adaptive_batching._growth.increase import IncreaseFunction
from adaptive_batching._memory.host_limits import status
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._probe.sizes import Measurement, ProbeResult
from adaptive_batching._probe.stored_probe import Conditions, StoredProbe
from adaptive_batching._ranks import agree
from adaptive_batching._step import sharing
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.share import share_out
from adaptive_batching._step.split import SplitRule
from adaptive_batching._torchtune.train import recipe_work
from adaptive_batching._torchtune.train.probing import Probe
from adaptive_batching._torchtune.train.run import TrainingLoop
from adaptive_batching.torchtune import accept_configs_of_torchao, load_stock
from tests.conftest import QUICKSTART, all_that_fits, small_run, without_pages
from tests.integration.faults import CollectivesThatFail, disarm, plan
from tests.support import power_cut
from tests.support.device_steps import noted_steps
from tests.support.environment import tame_malloc
from tests.support.overrides import RECOVER, SGD, TEACHER, VALIDATE, WIDE

RANK = int(os.environ.get("RANK", 0))
MIB = 2**20


class LossThatFailsOnOneRank(nn.CrossEntropyLoss):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            raise ZeroDivisionError("this rank has a bug")
        return super().forward(logits, labels)


def factory(every: int = 1, rankwise: bool = False) -> IncreaseFunction:
    return (lambda epoch, size: 2 + 2 * RANK if epoch else 0) if rankwise else power_cut.factory()


@contextlib.contextmanager
def in_the_group_of_this_launch(*modules: Any) -> Iterator[None]:
    """Recipes make and leave their process group; these share one."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in {"init_process_group", "destroy_process_group"} & set(dir(module)):
                stack.enter_context(mock.patch.object(module, name, lambda *args, **kwargs: None))
        yield


def stock_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Work around what keeps stock's distributed recipes from running on the cpu."""
    names = ("get_memory_stats", "log_memory_stats", "cleanup_before_training")
    nothing: dict[str, Any] = {name: lambda *args, **kwargs: {} for name in names}
    return mock.patch.multiple(training, **nothing)


def same_everywhere(self: LoRALinear) -> None:
    """Adapters that one device and many start with alike; their random numbers are others."""
    nn.init.constant_(self.lora_a.weight, 0.02)
    nn.init.constant_(self.lora_b.weight, 0.01)


Fault = dict[str, Any]
"""What runs out of memory in a step, as ``faults.plan`` says, on the ranks ``on``; ``call`` is a forward of the step.
Or ``collective``, the arguments of :class:`~tests.integration.faults.CollectivesThatFail`."""


@contextlib.contextmanager
def failing(faults: Sequence[Fault | None]) -> Iterator[None]:
    """Have memory run out in the first steps of training, each as if it were the first time."""
    train, finish = TrainingLoop.run, TrainingLoop._finish_step
    collectives = contextlib.ExitStack()

    def arm(loop: TrainingLoop) -> None:
        collectives.close()
        disarm()
        limit = loop._runner.limit
        limit.load_state_dict({**TokenLimit().state_dict(), "num_recoveries": limit.num_recoveries})
        step = loop.training.global_step
        fault = dict(faults[step] or {}) if step < len(faults) else {}
        fails_here = RANK in fault.pop("on", [])
        if "collective" in fault:
            collective = collectives.enter_context(CollectivesThatFail(*fault["collective"]))
            if fails_here:
                collective.begin()
        elif fails_here:
            plan.update({"times": 1, **fault})

    def run(loop: TrainingLoop) -> None:
        arm(loop)
        train(loop)

    def finish_step(loop: TrainingLoop, *arguments: Any) -> None:
        finish(loop, *arguments)
        arm(loop)

    patched = mock.patch.multiple(TrainingLoop, run=run, _finish_step=finish_step) if faults else None
    with collectives, patched or contextlib.nullcontext():
        yield


@dataclass
class Runner:
    inputs: Path
    directory: Path

    def __call__(
        self, kind: str, name: str, *overrides: str, stock: bool = False, faults: Sequence[Fault | None] = ()
    ) -> None:
        """Run a recipe; on each rank another layer of its model runs out of memory if it is one of ``faults.py``."""
        disarm()
        plan["layer"] = RANK
        module, config, added = OTHERS.get(kind, (f"{kind}_finetune_distributed", kind, ()))
        fewer = ("dataset.split=train[:32]", "epochs=1", "lr_scheduler.num_warmup_steps=2")
        settings = small_run(self.inputs, self.directory / name, *fewer, *added, *overrides)
        recipe = load_stock(module) if stock else importlib.import_module(f"recipes.{module}")
        sys.argv = [module, "--config", f"{QUICKSTART}/{config}_single_device.yaml", *settings]
        if RANK == 0:
            print(f"RUN {name}", flush=True)
        try:
            with (
                in_the_group_of_this_launch(load_stock(module)),
                stock_on_cpu() if stock else contextlib.nullcontext(),
                contextlib.nullcontext() if name == "hopeless" else without_pages(),
                failing(faults),
            ):
                recipe.recipe_main()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                (self.directory / name).mkdir(exist_ok=True)
                (self.directory / name / f"error_{RANK}.txt").write_text(f"{error}\n{traceback.format_exc()}")


def model(kind: str) -> str:
    return f"model._component_=tests.integration.faults.{kind}_model"


def samples(number: int) -> str:
    return f"dataset.split=train[:{number}]"


ACCUMULATE = "gradient_accumulation_steps=2"
GROW = ["batch_increase_function._component_=tests.integration.two_ranks.factory", "epochs=3"]
KINDS = ("full", "lora")
BY_LENGTH = ["micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB"]
FAULTS: dict[str, Fault] = {
    "first": {"where": "backward", "on": [1]},
    "forward_0": {"where": "forward", "on": [0], "call": 2},
    "forward_1": {"where": "forward", "on": [1], "call": 2},
    "forward_01": {"where": "forward", "on": [0, 1], "call": 2},
    "backward_0": {"where": "backward", "on": [0], "call": 2},
    "backward_01": {"where": "backward", "on": [0, 1], "call": 2},
    "twice": {"where": "forward", "on": [0], "times": 2},
}
"""One for each step of a run, the second forward of which is the first that may have run as large before."""
ONE_FORWARD: Fault = {"where": "forward", "on": [0]}
ONE_BACKWARD: Fault = {"where": "backward", "on": [1]}


def out_in_validation(on: int) -> list[Fault | None]:
    """The first forward finds out whether the longest samples fit."""
    return [{"where": "forward", "without_gradients": True, "fits": 4, "on": [on], "call": 2}]


def runs_as_stock(run: Runner) -> None:
    """Ours with no field set, where ranks cannot recover, and validated; and stock's; on two nodes of one device."""
    clip = ["clip_grad_norm=1.0", ACCUMULATE]
    in_backward = ["optimizer_in_bwd=True", "clip_grad_norm=null"]
    plan_of_layers = "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
    tensor_parallel = ["tensor_parallel_dim=2", plan_of_layers, "clip_grad_norm=null"]  # stock cannot clip there
    for name, overrides in {"full": clip, "in_backward": in_backward, "tensor_parallel": tensor_parallel}.items():
        run("full", f"{name}_stock", *overrides, stock=True)
        run("full", f"{name}_ours", *overrides, *(RECOVER if name != "full" else []))
    validate = [*clip, *VALIDATE, "run_val_every_n_steps=1"]
    run("full", "full_validated", *validate, "batch_size_val=3", "fsdp_reshard_after_forward=False")
    run("full", "full_validated_again", *validate, "batch_size_val=6", model("full"), faults=out_in_validation(1))
    run("full", "in_backward_probe", *in_backward, "use_maximum_batch_size=True")


@contextlib.contextmanager
def forwards_that_cost(tokens: int) -> Iterator[None]:
    """Have a forward cost as much as so many tokens."""
    in_split = mock.patch.object(recipe_work, "SplitRule", partial(SplitRule, forward_cost=tokens))
    with in_split, mock.patch.object(sharing, "FORWARD_COST", tokens):
        yield


def runs_that_are_cut(run: Runner) -> None:
    """By a number, by length, and by running out of memory."""
    common = [*SGD, model("full"), ACCUMULATE, samples(16 * len(FAULTS)), *RECOVER]
    run("full", "whole", *common)
    run("full", "cut_2", *common, "micro_batch_size=2")
    with forwards_that_cost(16):  # so that these few steps are split
        run("full", "cut_auto", *common, *BY_LENGTH)
    run("full", "recovered", *common, faults=list(FAULTS.values()))


def runs_that_recover(run: Runner) -> None:
    """Train with checkpointing, with parameters on the host, and in a way that cannot recover."""
    common = [*SGD, model("full"), samples(24), *RECOVER]
    checkpointing = [*common, "enable_activation_checkpointing=True"]
    run("full", "whole", *common)
    run("full", "checkpointing", *checkpointing, faults=[None, ONE_FORWARD, ONE_BACKWARD])
    without_pinning = partial(_distributed.CPUOffloadPolicy, pin_memory=False)  # which takes an accelerator
    with mock.patch.object(_distributed, "CPUOffloadPolicy", without_pinning):
        run("full", "offload", *common, "fsdp_cpu_offload=True", faults=[None, None, ONE_BACKWARD])
    every_time: Fault = {"where": "forward", "on": [1], "times": 10**6}
    run("full", "hopeless", model("full"), "micro_batch_size=4", faults=[every_time])


def runs_that_grow(run: Runner) -> None:
    """Grow together, and resume from a checkpoint within an epoch."""
    rankwise = ["batch_increase_function.rankwise=True", "adaptive_batching.max_batch_size=12"]
    run("full", "agreed", *GROW, *rankwise)
    keep = ["adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=4", "batch_size=2"]
    run("full", "kept", *SGD, *GROW, *keep, "adaptive_batching.max_batch_size=8")
    run("full", "constant", *SGD, *GROW, *keep, "adaptive_batching.max_batch_size=2")
    run_in_two(run, "full")


def run_in_two(run: Runner, kind: str, *added: str, faults: Sequence[Fault | None] = ()) -> None:
    """Run as a whole, and on with ``faults`` from what a power cut within the second epoch leaves."""
    every = ["adaptive_batching.increase_every=0.5", "adaptive_batching.max_batch_size=8", "save_every_n_steps=5"]
    common = [*GROW[:-1], "epochs=2", samples(48), *every, *added]
    whole, again = run.directory / f"{kind}_steps_whole", run.directory / f"{kind}_steps"
    with power_cut.copying(whole, 1.5 if RANK == 0 else None):
        run(kind, whole.name, *common)
    if RANK == 0:
        power_cut.left_of(whole).rename(again)
    dist.barrier()
    run(kind, again.name, *common, "resume_from_checkpoint=True", faults=faults)


def runs_of_other_recipes(run: Runner) -> None:
    """Train adapters, a second model, which is sharded on its own, and rounded weights."""
    for kind in ("lora", *OTHERS):
        common = [*SGD, ACCUMULATE, "tokenizer.max_seq_len=96", samples(48)]
        common += ["loss.beta=2.0"] if "dpo" in kind else []
        if kind != "kd":
            run(kind, f"{kind}_stock", *common, stock=True)
        common.append(model("full" if kind in ("full_dpo", "qat") else "lora"))
        frozen: Fault = {"where": "forward", "on": [1], "without_gradients": True}
        faults = [ONE_FORWARD, ONE_BACKWARD, *([frozen] if kind.endswith("dpo") else [])]
        with mock.patch.object(Probe, "find", all_fit):
            run(kind, f"{kind}_rows", *common, *BY_LENGTH, faults=faults)
            if kind == "kd":  # whose gradient of stock shrinks with the tokens of a step
                run(kind, f"{kind}_padded", *common, *BY_LENGTH, "adaptive_batching.padding=True")


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


def runs_on_devices(run: Runner) -> None:
    """A recipe over NCCL: probed, grown, validated, saved within an epoch and resumed; and out of memory."""
    run_all_on_devices(run, "full")
    few = [*ON_DEVICE, *SGD, model("full"), ACCUMULATE, samples(16 * len(FAULTS)), *RECOVER]
    run("full", "recovered", *few, faults=list(FAULTS.values()))


def run_all_on_devices(run: Runner, kind: str) -> None:
    validate = [] if kind.endswith("dpo") else [*VALIDATE, "run_val_every_n_steps=4"]
    run_in_two(run, kind, *ON_DEVICE, *validate, "use_maximum_batch_size=True")


def runs_of_others_on_devices(run: Runner) -> None:
    """The same of every other recipe; what QAT's steps ask for."""
    for kind in (*KINDS[1:], *OTHERS):
        run_all_on_devices(run, kind)
    for name, fields in {"stock": [], "recovers": RECOVER, "probed": ["use_maximum_batch_size=True"]}.items():
        common = [*ON_DEVICE, samples(160), "adaptive_batching.max_batch_size=4"]
        run_noted(run, "qat", f"qat_{name}", *common, *fields, stock=name == "stock")


def runs_of_many_steps(run: Runner) -> None:
    """A hundred steps of every recipe over NCCL."""
    for kind in (*KINDS, *OTHERS):
        run_noted(run, kind, kind, *ON_DEVICE, samples(200), "batch_size=1", *RECOVER)


def run_noted(run: Runner, kind: str, name: str, *overrides: str, stock: bool = False) -> None:
    """Run, and leave in ``ends.json`` what the device was asked for up to the end of each step."""
    with noted_steps() as ends:
        run(kind, name, *overrides, stock=stock)
    if RANK == 0:
        (run.directory / name / "ends.json").write_text(json.dumps([asdict(end) for end in ends]))


ON_DEVICE = ("device=cuda", "dtype=bf16")
FEW = [*WIDE, samples(400), "tokenizer.max_seq_len=256"]
PROBE = ["use_maximum_batch_size=True", "adaptive_batching.round_to_power_of_two=False", "batch_size=1"]


def limit_memory(extra_mib: int) -> None:
    """Let the second rank alone grow by no more than ``extra_mib``."""
    tame_malloc()
    CpuMeter().release()
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + extra_mib * MIB, -1))


def runs_within_memory(run: Runner) -> None:
    """Runs under a real limit on one rank."""
    limit_memory(240)
    run("full", "unequal_memory", *FEW, *PROBE, "max_steps_per_epoch=1", "adaptive_batching.memory_limit=4GiB")
    one = [*SGD, *FEW, "max_steps_per_epoch=1", "batch_size=96", "adaptive_batching.memory_limit=8GiB", *RECOVER]
    run("full", "real_limit", *one)
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    run("full", "real_no_limit", *one)


def runs_of_short_samples(run: Runner) -> None:
    """Runs of a model that gathers its output layer for each chunk of tokens, and what reads so few of them."""
    in_chunks = ["custom_sharded_layers=[tok_embeddings,output]"]
    clipped = [*in_chunks, "clip_grad_norm=1.0"]
    run("full", "stock", *clipped, stock=True)
    with mock.patch.object(agree, "_start_gloo", side_effect=RuntimeError("no host of that name")):
        run("full", "no_gloo_but_asked_for", *RECOVER)
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("a group was made")):
        run("full", "ours", *clipped)

    short = [*SGD, model("full"), ACCUMULATE, "batch_size=8", *RECOVER]
    short += ["dataset._component_=tests.integration.random_tokens.short_samples"]
    run("full", "whole", *short, "loss._component_=torch.nn.CrossEntropyLoss")
    with forwards_that_cost(4):  # so that these few tokens are split
        for name, way in {"2": ["micro_batch_size=2"], "auto": BY_LENGTH}.items():
            faults = [{**each, "call": 2, "fits": 1} for each in (ONE_FORWARD, ONE_BACKWARD)]
            run("full", f"cut_{name}", *short, *in_chunks, *way)
            with mock.patch.object(Probe, "find", all_fit):
                run("full", f"cut_{name}_recovered", *short, *in_chunks, *way, faults=faults)


UNEVEN = ["dataset._component_=tests.integration.random_tokens.uneven_samples", "tokenizer.max_seq_len=96"]
SHARED = {
    "full": [*UNEVEN, "dataset.samples=96", *VALIDATE, "run_val_every_n_steps=3"],
    "kd": UNEVEN,
    "lora_dpo": [samples(32), "tokenizer.max_seq_len=256"],
}
"""Kinds of run whose ranks share out the samples of a step, and their data."""
SAMPLES_OF_ALL = {"full": 8, "kd": 8, "lora_dpo": 4}
"""In a batch of all ranks, two of which make a step."""
SHARED_FAULTS: list[Fault | None] = [
    None, {"where": "forward", "on": [0]}, {"where": "backward", "on": [1]}, {"where": "forward", "on": [0, 1]},
    {"where": "backward", "on": [0], "times": 2, "fits": 1}, None,
]  # fmt: skip

FAULTS_AFTER: list[Fault | None] = [
    *[None] * 5, {"where": "forward", "on": [0, 1]}, {"where": "backward", "on": [0, 1]}
]  # fmt: skip
"""In the two steps after the fifth, on whichever rank samples of another run."""


def all_fit(probe: Probe) -> StoredProbe:
    """Find, in place of a probe, that all samples of a step fit."""
    largest = probe.sizing.request.upper
    found = ProbeResult(largest, "memory", 1, 1, "predict", 0.0, [Measurement(largest, True, 1)])
    return StoredProbe(found, Conditions({}, {}, {}, {}, {}), upper=largest)


def of_shared_steps(kind: str, num_ranks: int) -> list[str]:
    """Return the settings of a run in which so many ranks share out each step, always of the same samples."""
    return [*SGD, ACCUMULATE, *SHARED[kind], f"batch_size={SAMPLES_OF_ALL[kind] // num_ranks}"]


def runs_that_are_shared_out(run: Runner) -> None:
    """Share out each step: undisturbed, after a failure, resumed, and where a rank is lost."""
    with mock.patch.object(Probe, "find", all_fit):
        for kind in SHARED:
            common = [*of_shared_steps(kind, 2), *BY_LENGTH]
            run(kind, f"{kind}_shared", *common)
        common = [*of_shared_steps("full", 2), *BY_LENGTH]
        run("full", "drawn", *common, "adaptive_batching.balance_ranks=False")
        run("full", "padded", *common, "adaptive_batching.padding=True")
        run("full", "recovered", *common, model("full"), faults=SHARED_FAULTS)
        few = [*SGD, *UNEVEN, "dataset.samples=48", *BY_LENGTH]
        run_in_two(run, "full", *few, model("full"), faults=FAULTS_AFTER)
        ends_on_one = share_out if RANK == 0 else mock.Mock(side_effect=ZeroDivisionError)
        with mock.patch.object(sharing, "share_out", ends_on_one):
            run("full", "lost", *common)
    sys.exit()  # the other rank has ended


FailingCollective = tuple[str, str, int, list[int]]
"""Which kind, at what moment, which one of them, and on which ranks"""
SOME = [(1, [1]), (4, [0, 1]), (6, [0])]
KNOWN: list[FailingCollective] = [
    (kind, moment, *each) for kind in ("gather", "scatter") for moment in ("before", "inside", "after") for each in SOME
]
"""Moments at which a rank knows whether the others get what they wait for: it recovers, from each in another step."""
FATAL: list[FailingCollective] = [
    ("gather", "issued", 1, [1]), ("scatter", "waiting", 6, [0]), ("gather", "lost", 1, [1]),
    ("gather", "draining", 6, [0]),
]  # fmt: skip
"""Faults on one rank that end the other as well; each needs processes of its own."""


def name_of(kind: str, moment: str, number: int, on: Sequence[int]) -> str:
    return f"{kind}_{moment}_{number}_{''.join(map(str, on))}"


def fatal_cases(which: str) -> list[FailingCollective]:
    """Return the cases of a launch that take processes of their own."""
    return FATAL if which == "failing_collectives" else []


def runs_of_failing_collectives(run: Runner, cases: list[FailingCollective], name: str = "recovered") -> None:
    """Memory runs out at a moment of a collective, in each step at another."""
    steps = [*SGD, ACCUMULATE, "clip_grad_norm=1000", samples(16 * max(len(cases), 2)), *RECOVER]
    if name == "recovered":
        run("full", "whole", *steps)
    run("full", name, *steps, faults=[{"collective": case[:3], "on": case[3]} for case in cases])


LAUNCHES: dict[str, Callable[[Runner], None]] = {
    "as_stock": runs_as_stock,
    "split": runs_that_are_cut,
    "recovery": runs_that_recover,
    "growth": runs_that_grow,
    "others": runs_of_other_recipes,
    "devices": runs_on_devices,
    "devices_others": runs_of_others_on_devices,
    "devices_level": runs_of_many_steps,
    "memory": runs_within_memory,
    "short_samples": runs_of_short_samples,
    "shared": runs_that_are_shared_out,
    "failing_collectives": partial(runs_of_failing_collectives, cases=KNOWN),
}  # fmt: skip


def run_launch(which: str, inputs: Path, directory: Path, case: FailingCollective | None = None) -> None:
    """Run a launch on this rank, or one of its cases that take processes of their own."""
    LoRALinear.initialize_parameters = same_everywhere
    accept_configs_of_torchao()  # stock's recipe asks for a class by the name that it had
    run = Runner(inputs, directory)
    backend = "cuda:nccl,cpu:gloo" if which.startswith("devices") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    with all_that_fits():
        if case is not None:
            runs_of_failing_collectives(run, [case], name_of(*case))
            sys.exit()  # the other rank may be anywhere
        LAUNCHES[which](run)
    dist.barrier()
    dist.destroy_process_group()
