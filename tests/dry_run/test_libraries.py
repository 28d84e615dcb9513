"""Scripts as the public examples of other libraries have them, dry-run: steps made, and a peak that a count by hand explains.

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

from adaptive_batching._emulated_device import BuildError, build
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
    activations: float | None = None

    @property
    def most(self) -> float:
        tokens = self.samples * LENGTH
        of_a_layer = 2 * (17 * HIDDEN + 6 * INTERMEDIATE)  # in 16 bits; more where it is in 32
        logits = 4 * VOCABULARY
        activations = tokens * (2 * LAYERS * of_a_layer + 4 * logits) if self.activations is None else self.activations
        return self.stays + self.passes + activations


def lora(rank: int, *shapes: tuple[int, int]) -> int:
    """Return the parameters of a LoRA on projections of such shapes in each layer."""
    return LAYERS * sum(rank * (inputs + outputs) for inputs, outputs in shapes)


ALL = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEY_VALUE)] * 2 + [(HIDDEN, INTERMEDIATE)] * 2 + [(INTERMEDIATE, HIDDEN)]
LORA_OF_ALL, LORA_OF_TWO = lora(16, *ALL), lora(16, (HIDDEN, HIDDEN), (HIDDEN, KEY_VALUE))
NO_TORCHAO_IN_THE_WAY = "import peft, peft.import_utils; peft.import_utils.is_torchao_available()"
# Weights, gradients and two moments, of 2 bytes each or of 4
SIXTEEN_BITS, THIRTY_TWO_BITS = 8 * PARAMETERS, 16 * PARAMETERS
IMAGES = 32 * 4 * 224 * 224  # bytes of one channel of a batch
FAST = [
    Script("ddp", SIXTEEN_BITS, 4 * PARAMETERS, ranks=2),  # buckets, and the norm's and the optimizer's temporaries
    Script("fsdp2", THIRTY_TWO_BITS / 2, 10 * EMBEDDINGS, ranks=2),  # gathered in 16 bits, reduced in 32
    Script("transformers_trainer", SIXTEEN_BITS, 2 * PARAMETERS, needs="import accelerate"),
    # A ResNet-50 writes 11.1 million values for an image; autocast keeps them in 16 bits, batch norm and ReLU another each
    Script("vision_fp16", 12 * RESNET_50, 2 * RESNET_50, activations=32 * 11.1e6 * 2 * 3 + 64 * IMAGES),
]  # fmt: skip
SLOW = [
    Script("compiled", SIXTEEN_BITS, 4 * PARAMETERS),
    Script("accelerate_loop", THIRTY_TWO_BITS, 6 * PARAMETERS, needs="import accelerate"),
    Script("accelerate_fsdp2", THIRTY_TWO_BITS / 2, 10 * EMBEDDINGS, ranks=2, needs="import accelerate"),
    Script("trl_sft", SIXTEEN_BITS, 4 * PARAMETERS, needs="import trl"),
    Script(
        "trl_dpo", 2 * PARAMETERS + 8 * LORA_OF_ALL, 8 * LORA_OF_ALL, samples=4,
        needs=f"import trl; {NO_TORCHAO_IN_THE_WAY}",
    ),
    Script("peft_lora", 2 * PARAMETERS + 16 * LORA_OF_TWO, 4 * LORA_OF_TWO, samples=4, needs=NO_TORCHAO_IN_THE_WAY),
    Script(  # half a byte and its scale; the embedding is in 32 bits, and for a while there are the weights in 16
        "bitsandbytes_qlora", LINEAR / 2 + 4 * EMBEDDINGS + 4 * LORA_OF_ALL, 2 * PARAMETERS + 12 * LORA_OF_ALL,
        needs=f"import bitsandbytes; {NO_TORCHAO_IN_THE_WAY}",
    ),
    Script("lightning_trainer", THIRTY_TWO_BITS, 6 * PARAMETERS, needs="import lightning"),
    Script(  # weights and gradients in 16 bits; the rest in 32, of half; buckets of 500 million elements
        "deepspeed_zero", 2 * PARAMETERS + 12 * PARAMETERS / 2, 4 * PARAMETERS + 4 * 500e6, ranks=2,
        arguments=("--stage", "2"), needs="import deepspeed",
    ),
    Script(
        "deepspeed_zero", 16 * PARAMETERS / 2, 4 * PARAMETERS + 6 * 500e6, ranks=2, arguments=("--stage", "3"),
        needs="import deepspeed",
    ),
    Script(  # whose embedding and output are two
        "torchtitan_llama", 16 * (PARAMETERS + EMBEDDINGS) / 2, 10 * EMBEDDINGS, ranks=2,
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
    [*(pytest.param(s, id=named(s)) for s in FAST), *(pytest.param(s, id=named(s), marks=pytest.mark.slow) for s in SLOW)],
)
def test_a_script_of_a_library_makes_its_steps_and_its_peak_is_what_it_holds(script: Script, tmp_path: Path) -> None:
    if script.needs and (why := missing(script.needs)):
        pytest.skip(why)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(script.ranks)]
    dry_run = [PYTHON, "-m", "adaptive_batching", "dry-run", "--memory", "40GiB", "--devices", str(script.ranks)]
    command = [PYTHON, *(ranks if script.ranks > 1 else []), str(SCRIPTS / f"{script.name}.py"), *script.arguments]
    done = subprocess.run(
        [*dry_run, "--steps", str(STEPS), "--json", "--", *command],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == STEPS and found["processes"] == script.ranks and found["exit_code"] == 0
    peak = found["peak_allocated_bytes"]
    assert script.stays <= peak <= script.most, f"{script.stays / 1e9:.2f} <= {peak / 1e9:.2f} <= {script.most / 1e9:.2f}"
