"""``quickstart``: a first run, on inputs that it makes, and the command to go on with."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from adaptive_batching._torchtune import quickstart
from adaptive_batching._torchtune.names import recipes_folder

# A run of a minute on two cores. The probe is told of samples half as long as the longest, so that the first full batch
# runs out of memory, and is recovered.
_SHORT = [
    *("dataset.split=train[:384]", "lr_scheduler.num_warmup_steps=10"),
    *("adaptive_batching.memory_limit=1.5GiB", "adaptive_batching.sequence_length=128"),
]
_STAGED = """The out-of-memory error in this run is staged, to show how a step recovers: sequence_length=128 tells the
probe of samples half as long as the longest, and memory_limit=1.5GiB is little. Take neither into a config of your own.
"""
_NEXT = "lora_finetune_single_device --config llama3_2/1B_lora_single_device micro_batch_size=auto"
_REPOSITORY = "meta-llama/Llama-3.2-1B-Instruct"
_WEIGHTS = Path("/tmp/Llama-3.2-1B-Instruct")  # where that config looks for them


def add_quickstart(subparsers: Any, prog: str) -> None:
    """Add ``quickstart``."""
    text = "Make real data, a tokenizer and a small model, then probe, grow and train on the CPU. No download."
    parser = subparsers.add_parser("quickstart", prog=f"{prog} quickstart", help=text, description=text)
    parser.add_argument("--data_dir", type=Path, default=Path("data/quickstart"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")

    def run(args: argparse.Namespace) -> None:
        folder, program = recipes_folder(), program_on_this_machine(prog)
        try:
            quickstart.build(args.data_dir)
        except FileExistsError as error:
            parser.error(str(error))
        overrides = [f"data_dir={args.data_dir}", *_SHORT, *args.overrides]
        command = f"{program} run full_finetune_single_device --config quickstart/full_single_device"
        print(f"Running this command:\n  {command} \\\n    {shlex.join(overrides)}\n\n{_STAGED}", flush=True)
        sys.argv = [parser.prog, "--config", f"{folder}/configs/quickstart/full_single_device.yaml", *overrides]
        try:
            runpy.run_path(str(folder / "full_finetune_single_device.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        print(f"\n{what_next(program, has_gpu=torch.cuda.is_available())}")

    parser.set_defaults(func=run)


def program_on_this_machine(prog: str) -> str:
    """Return what to type for this program on this machine: its name, its path, or the module."""
    if shutil.which(prog):
        return prog
    path = Path(sys.executable).with_name(prog)
    if os.access(path, os.X_OK):
        return shlex.quote(str(path))
    return f"{shlex.quote(sys.executable)} -m adaptive_batching"


def what_next(program: str, *, has_gpu: bool) -> str:
    """Return the next commands to type, with what they need that is not there."""
    lines = [f"Next, with a config of your own, or one of torchtune's ('{program} ls'):"]
    if not _WEIGHTS.is_dir():
        lines += [
            f"  {program} download {_REPOSITORY} --output-dir {_WEIGHTS} \\",
            "    --ignore-patterns 'original/consolidated.00.pth' --hf-token TOKEN",
            f"    (first, as the weights are not in {_WEIGHTS}; the model's page on huggingface.co grants access)",
        ]
    on_cpu = "" if has_gpu else " device=cpu dtype=fp32"
    return "\n".join([*lines, f"  {program} run {_NEXT}{on_cpu}"])
