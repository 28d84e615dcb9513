"""Command lines, with a small model and its data in the place of those that they name, and where to run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

from tests.conftest import ARCHITECTURE

SCRIPTS = {
    "adaptive-batching": "from adaptive_batching.__main__ import main",
    "tune": "from torchtune._cli.tune import main",
}


def small(command: str, inputs: Path, output_dir: Path) -> str:
    """Return overrides that let a command run as it is on a CPU, but for the model, its tokenizer and the data.

    They work with the quickstart's configs as well as with torchtune's own. What the command sets stays.
    """
    adapters = "lora_" if "lora" in command else ""
    overrides = [
        f"output_dir={output_dir}", "device=cpu", "dtype=fp32", "enable_activation_checkpointing=False",
        f"model._component_=torchtune.models.llama2.{adapters}llama2",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
        "tokenizer._component_=torchtune.models.llama2.llama2_tokenizer", f"tokenizer.path={inputs}/tokenizer.model",
        "tokenizer.max_seq_len=64", f"checkpointer.checkpoint_dir={inputs}/model", "checkpointer.model_type=LLAMA2",
        "checkpointer.checkpoint_files=[model.safetensors]", "dataset._component_=torchtune.datasets.instruct_dataset",
        "dataset.source=json", f"dataset.data_files={inputs}/train.json", "dataset.split=train[:80]",
        "dataset.column_map.input=instruction", "dataset.column_map.output=output",
        "adaptive_batching.memory_limit=6GiB",
    ]  # fmt: skip
    taken = {word.split("=")[0] for word in shlex.split(command)}
    return shlex.join(override for override in overrides if override.split("=")[0] not in taken)


def make_environment(folder: Path, checkout: Path | None = None) -> None:
    """Make a virtual environment that has what this one has (torch, torchtune and the like), but for this package.

    Of the package it has ``checkout``, as ``make`` would have installed it, or else pip to install it with.
    """
    subprocess.run([sys.executable, "-m", "venv", *(["--without-pip"] if checkout else []), folder], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for path in (path for path in sys.path if path.endswith("-packages")):
        for entry in Path(path).iterdir():
            if "adaptive_batching" not in entry.name and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(f"{packages}\n{checkout or ''}\n")
    for name in [*SCRIPTS] if checkout else ["tune"]:
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python\n{SCRIPTS[name]}\nmain()\n")
        script.chmod(0o755)


def in_shell(command: str, cwd: Path, environment: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a shell, in a virtual environment, without what a test run has put into its own."""
    ours = ("MAKE", "MFLAGS", "PYTEST", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    path = f"{environment}/bin{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**kept, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip


def in_this_process(*arguments: str) -> int:
    """Run ``adaptive-batching`` as its script does, and return its status; torch is here already."""
    from torchtune import _recipe_registry

    from adaptive_batching.__main__ import main

    recipes = mock.patch.object(_recipe_registry, "_ALL_RECIPES", [*_recipe_registry._ALL_RECIPES])
    argv, path = ["adaptive-batching", *arguments], [*sys.path]
    with recipes, mock.patch.multiple(sys, argv=argv, path=path), mock.patch.dict(os.environ):
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
