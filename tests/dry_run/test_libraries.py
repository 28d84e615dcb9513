"""Dry runs of scripts as other libraries' public examples have them: their steps, and a peak that a count explains.

With `DRY_RUN_PYTHON` set they run in that interpreter's environment; what it lacks is skipped.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptive_batching._dry_run.device import BuildError, build
from tests.conftest import ROOT

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = os.environ.get("DRY_RUN_PYTHON", sys.executable)
STEPS = 2

# What scripts/llama.py says: Llama 3.2 1B
HIDDEN, INTERMEDIATE, LAYERS, KEY_VALUE, VOCABULARY, LENGTH = 2048, 8192, 16, 512, 128256, 512
EMBEDDINGS = VOCABULARY * HIDDEN
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * INTERMEDIATE)
PARAMETERS = EMBEDDINGS + LINEAR + (2 * LAYERS + 1) * HIDDEN
RESNET_50 = 25_557_032


@dataclass(frozen=True)
class Script:
    """A script, and what a rank of it holds at its peak in bytes: at least what stays, at most all of it."""

    name: str
    stays: float
    """Weights, gradients and the optimizer's states."""
    passes: float
    """What a step takes for a while of weights and gradients: copies of another type, buckets, what a layer gathers."""
    samples: int = 2
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    needs: str = ""
    """A statement that fails where the script cannot run."""
    checkpointing: bool = False
    activations: float | None = None
    """Of what is no Llama."""

    @property
    def most(self) -> float:
        of_a_layer = 2 * (17 * HIDDEN + 6 * INTERMEDIATE)  # bytes of a token, in 16 bits
        layers = of_a_layer + 2 * LAYERS * HIDDEN if self.checkpointing else LAYERS * of_a_layer
        logits = 3 * 4 * VOCABULARY  # in 32 bits, their probabilities, their gradient
        activations = self.samples * LENGTH * (layers + logits) if self.activations is None else self.activations
        return self.stays + self.passes + activations


def lora(rank: int, *shapes: tuple[int, int]) -> int:
    """Return the parameters of a LoRA on projections of such shapes in each layer."""
    return LAYERS * sum(rank * (inputs + outputs) for inputs, outputs in shapes)


ALL = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEY_VALUE)] * 2 + [(HIDDEN, INTERMEDIATE)] * 2 + [(INTERMEDIATE, HIDDEN)]
LORA_OF_ALL, LORA_OF_TWO = lora(16, *ALL), lora(16, (HIDDEN, HIDDEN), (HIDDEN, KEY_VALUE))
NO_TORCHAO_IN_THE_WAY = "import peft, peft.import_utils; peft.import_utils.is_torchao_available()"
# Weights, gradients and two moments, of 2 bytes each or of 4
SIXTEEN_BITS, THIRTY_TWO_BITS = 8 * PARAMETERS, 16 * PARAMETERS
FAST = [
    # DDP's buckets are another copy of the gradients. AdamW has a temporary for each parameter, all at once.
    Script("ddp", SIXTEEN_BITS + 2 * PARAMETERS, 2 * PARAMETERS, ranks=2),
    # FSDP gathers the embeddings in 16 bits, and reduces their gradient in 32.
    Script("fsdp2", THIRTY_TWO_BITS / 2, 4 * PARAMETERS / 2 + 10 * EMBEDDINGS, ranks=2),
    Script("transformers_trainer", SIXTEEN_BITS, 0, needs="import accelerate"),
    # A ResNet-50 makes 11.1 million values of an image, in 16 bits, and normalizes and rectifies them
    Script("vision_fp16", 12 * RESNET_50, 2 * RESNET_50, activations=32 * 11.1e6 * 2 * 3),
]  # fmt: skip
SLOW = [
    Script("compiled", SIXTEEN_BITS, 2 * PARAMETERS),
    Script("accelerate_loop", THIRTY_TWO_BITS, (2 + 4) * PARAMETERS, needs="import accelerate"),  # autocast's copies
    Script(
        "accelerate_fsdp2", THIRTY_TWO_BITS / 2, 4 * PARAMETERS / 2 + 10 * EMBEDDINGS, ranks=2, checkpointing=True,
        needs="import accelerate",
    ),
    Script("trl_sft", SIXTEEN_BITS, 0, checkpointing=True, needs="import trl"),
    Script(
        "trl_dpo", 2 * PARAMETERS + 8 * LORA_OF_ALL, 0, samples=4, checkpointing=True,
        needs=f"import trl; {NO_TORCHAO_IN_THE_WAY}",
    ),
    Script(
        "peft_lora", 2 * PARAMETERS + 16 * LORA_OF_TWO, 0, samples=4, checkpointing=True, needs=NO_TORCHAO_IN_THE_WAY
    ),
    Script(  # half a byte of each weight, the embeddings in 32 bits, and a copy of autocast's in 16
        "bitsandbytes_qlora", LINEAR / 2 + 4 * EMBEDDINGS + 4 * LORA_OF_ALL, 2 * EMBEDDINGS + 8 * LORA_OF_ALL,
        checkpointing=True, needs=f"import bitsandbytes; {NO_TORCHAO_IN_THE_WAY}",
    ),
    Script("lightning_trainer", THIRTY_TWO_BITS, (2 + 4) * PARAMETERS, needs="import lightning"),
    # Weights and gradients in 16 bits, of stage 3 those too in parts, the rest in 32; buckets of 500 million elements
    Script(
        "deepspeed_zero", 2 * PARAMETERS + 12 * PARAMETERS / 2, 2 * PARAMETERS + 4 * 500e6, ranks=2,
        arguments=("--stage", "2"), needs="import deepspeed",
    ),
    Script(
        "deepspeed_zero", 16 * PARAMETERS / 2, 4 * PARAMETERS + 4 * 500e6, ranks=2, arguments=("--stage", "3"),
        needs="import deepspeed",
    ),
    Script(  # whose embedding and output are two
        "torchtitan_llama", THIRTY_TWO_BITS / 2 + 16 * EMBEDDINGS / 2, 4 * PARAMETERS / 2 + 10 * EMBEDDINGS, ranks=2,
        needs="import torchtitan.config.manager",
    ),
]  # fmt: skip


@functools.cache
def missing(needs: str) -> str | None:
    done = subprocess.run([PYTHON, "-c", needs], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(str(error))


def named(script: Script) -> str:
    return "-".join([script.name, *script.arguments[1:]])


@pytest.mark.parametrize(
    "script",
    [
        *(pytest.param(s, id=named(s), marks=pytest.mark.wide if s.ranks > 1 else []) for s in FAST),
        *(pytest.param(s, id=named(s), marks=pytest.mark.slow) for s in SLOW),
    ],
)
def test_a_script_of_a_library_makes_its_steps_and_its_peak_is_what_it_holds(script: Script, tmp_path: Path) -> None:
    if script.needs and (why := missing(script.needs)):
        pytest.skip(why)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(script.ranks)]
    dry_run = [PYTHON, "-m", "adaptive_batching", "dry-run", "--gpu", "A100-40GB", "--devices", str(script.ranks)]
    command = [PYTHON, *(ranks if script.ranks > 1 else []), str(SCRIPTS / f"{script.name}.py"), *script.arguments]
    done = subprocess.run(
        [*dry_run, "--steps", str(STEPS), "--json", "--", *command],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == STEPS and found["processes"] == script.ranks and found["exit_code"] == 0
    time = found["time"]
    assert time is not None, done.stderr[-4000:]
    assert sum(time["limits"].values()) == pytest.approx(1, abs=0.03) and time["devices"] == script.ranks
    peak = found["peak_allocated_bytes"]
    assert script.stays <= peak <= script.most, (
        f"{script.stays / 1e9:.2f} <= {peak / 1e9:.2f} <= {script.most / 1e9:.2f}"
    )
