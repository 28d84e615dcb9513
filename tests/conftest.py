"""What the tests share: small but real inputs, and runs of real recipes through ``tune run``."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny; waiting threads cost more than they save

import hypothesis
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from adaptive_batching._report.record import Report
from tests.support.garbage import quicken_collections
from tests.support.overrides import TEACHER
from tests.support.power_cut import copying, left_of

# What a run of continuous integration says has to be what the next one says. To look for more, leave this out.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)  # no test is timed
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "recipes" / "configs" / "quickstart"
ARCHITECTURE = dict(
    vocab_size=700, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=64, intermediate_dim=128, max_seq_len=512
)


LONG = (
    "test_exploring.py", "test_find.py",
    "test_strangers.py", "test_trl.py", "test_loaders.py", "test_two_ranks.py", "test_other_loops.py",
    "test_configs.py", "test_patches.py", "test_real_memory.py",
    "transformers/test_end_to_end.py", "transformers/test_found_before.py", "transformers/test_run.py",
    "transformers/test_encoder_decoder.py", "loop/test_page.py",
)  # fmt: skip
"""Files of most of the seconds of what starts no run through ``tune run``"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is ``long``, and have one worker of pytest-xdist run all that is marked ``serial``."""
    for item in items:
        if any(map(item.path.match, LONG)):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("serial"):
            item.add_marker(pytest.mark.xdist_group("serial"))


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Keep what imports and earlier tests have made out of each collection."""
    quicken_collections()


@pytest.fixture(autouse=True)
def recipes_as_torchtune_ships_them() -> Iterator[None]:
    """Put back what a command of ours, run in this process, has torchtune's own find."""
    yield
    registry = sys.modules.get("torchtune._recipe_registry")
    if registry is not None and any(os.path.isabs(recipe.file_path) for recipe in registry._ALL_RECIPES):  # noqa: PTH117
        registry._ALL_RECIPES[:] = runpy.run_path(str(registry.__file__))["_ALL_RECIPES"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what is made once, by whichever worker of pytest-xdist comes first."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    directory.mkdir(exist_ok=True)
    os.environ.setdefault("HF_DATASETS_CACHE", str(directory / "datasets"))
    return directory


@contextlib.contextmanager
def made_once(directory: Path) -> Iterator[bool]:
    """True where ``directory`` is still to be made; other workers wait until it is."""
    done = directory.with_suffix(".done")
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


def make_inputs(folder: Path) -> None:
    """Fill a directory with real text, a tokenizer trained on it, tiny models: one, a teacher, a ``WIDE`` one."""
    from adaptive_batching._torchtune.cli.quickstart import Architecture, build, build_model, save_checkpoint

    small = Architecture(**ARCHITECTURE)
    build(folder, architecture=small)
    save_checkpoint(build_model(small, seed=1), folder / "teacher", small)
    wide = replace(small, embed_dim=128, intermediate_dim=256)
    save_checkpoint(build_model(wide, seed=0), folder / "wide", wide)


@pytest.fixture(scope="session")
def inputs(shared: Path) -> Path:
    """Data, a tokenizer and models: see :func:`make_inputs`."""
    with made_once(shared / "small") as missing:
        if missing:
            make_inputs(shared / "small")
    return shared / "small"


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    output_dir: Path

    @property
    def _lines(self) -> list[str]:
        return [line for log in sorted((self.output_dir / "logs").glob("*.txt")) for line in log.open()]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every logged step, in order and at full precision, without timings."""
        found = [re.findall(r"(\w+):(\S+)", line.split("|", 1)[1]) for line in self._lines]
        return [{k: float(v.rstrip(",")) for k, v in step if not k.startswith("tokens_per_second")} for step in found]

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        return self.weights_in(f"epoch_{epoch}")

    def weights_in(self, folder: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in sorted((self.output_dir / folder).glob("*model*.safetensors")):
            found |= load_file(path)
        assert found, f"no weights in {self.output_dir}/{folder}"
        return found

    @property
    def by_step(self) -> dict[int, dict[str, float]]:
        """The metrics of every step that is logged; of one that ran twice, as after a crash, those of the last time."""
        found: dict[int, dict[str, float]] = {}
        for line, metrics in zip(self._lines, self.metrics, strict=True):
            found.setdefault(int(line.split()[1]), {}).update(metrics)  # a validation has a line of its own
        return found

    def copy_when_cut_off(self, folder: Path) -> Run:
        """Have ``folder`` hold what was there when the run was cut off, as ``cut_off_at`` told it to be."""
        shutil.copytree(left_of(self.output_dir), folder)
        return Run(folder)


TuneRun = Callable[..., Run]
RECIPES: dict[str, tuple[str, str, list[str]]] = {
    "full": ("full_finetune_single_device", "full", []),
    "lora": ("lora_finetune_single_device", "lora", []),
    "lora_dpo": ("lora_dpo_single_device", "lora_dpo", []),
    "kd": ("knowledge_distillation_single_device", "lora", TEACHER),
}
"""Recipe, config, and what is added to the config for each kind of run."""


@pytest.fixture
def tune_run(inputs: Path, tmp_path: Path) -> TuneRun:
    """``tune_run(recipe, *overrides, name=...)``: a real run of torchtune's command, in this process.

    ``recipe`` is a key of ``RECIPES``; with ``stock=True`` torchtune's own recipe runs instead of ours.
    ``replaced`` are parts of the YAML that the command line cannot replace; ``cut_off_at`` is the epoch before which
    its folder is copied, if the batch grows by the function of ``tests/support/power_cut.py``.
    """
    return lambda kind, *overrides, name="out", **how: _tune_run(inputs, tmp_path / name, kind, overrides, **how)


@pytest.fixture
def baseline(inputs: Path, shared: Path) -> TuneRun:
    """As ``tune_run``, but a run that tests compare others with is made once, for all tests that ask for it."""

    def run(kind: str, *overrides: str, **how: Any) -> Run:
        asked = repr((kind, sorted(overrides), sorted(how.items())))
        directory = shared / f"baseline_{hashlib.sha1(asked.encode()).hexdigest()}"
        with made_once(directory) as missing:
            if missing:
                _tune_run(inputs, directory, kind, overrides, **how)
        return Run(directory)

    return run


def _tune_run(
    inputs: Path, directory: Path, kind: str, overrides: Sequence[str], *, stock: bool = False,
    replaced: Mapping[str, object] = MappingProxyType({}), cut_off_at: float | None = None,
) -> Run:  # fmt: skip
    recipe, source_name, added = RECIPES[kind]
    cfg: Any = OmegaConf.to_container(OmegaConf.load(QUICKSTART / f"{source_name}_single_device.yaml"))
    config = directory.parent / f"{directory.name}.yaml"
    OmegaConf.save({**cfg, **replaced}, config)
    target = recipe if stock else f"recipes/{recipe}.py"
    with copying(directory, cut_off_at):
        _main(
            "run", target, "--config", str(config), *small_run(inputs, directory, *added, *overrides, without=replaced)
        )
    return Run(directory)


def small_run(inputs: Path, output_dir: Path, *overrides: str, without: Collection[str] = ()) -> list[str]:
    """Return what a small run sets in the quickstart's configs: ``overrides``, the last of each key, and defaults.

    Args:
        without: Keys, or sections, that have no defaults.
    """
    defaults = {
        "data_dir": inputs, "output_dir": output_dir, "dataset.split": "train[:50]", "tokenizer.max_seq_len": 64,
        "batch_size": 4, "epochs": 2, "use_maximum_batch_size": False, "batch_increase_function": "null",
        "lr_scheduler.num_warmup_steps": 5, **{f"model.{key}": value for key, value in ARCHITECTURE.items()},
    }  # fmt: skip
    settings = {key: f"{key}={value}" for key, value in defaults.items() if key.split(".")[0] not in without}
    return [*{**settings, **{override.split("=")[0]: override for override in overrides}}.values()]


makes_pages = False
"""True to have the page of each run made, as users do."""

probes_by_speed = False
"""True to probe for forwards that are large enough, as users do; see :func:`all_that_fits`."""


def all_that_fits() -> contextlib.AbstractContextManager[Any]:
    """Have probes look for all that fits: how large a forward has to be depends on the speed of the machine."""
    from adaptive_batching._step.forward_times import ForwardTimes

    return mock.patch.object(ForwardTimes, "enough", lambda self: None)


@contextlib.contextmanager
def without_pages() -> Iterator[None]:
    """Have no page of a run made, neither after an epoch nor at its end."""
    with mock.patch.object(Report, "_make_page"), mock.patch("adaptive_batching._report.record.start_page"):
        yield


def _main(*arguments: str) -> None:
    from torchtune._cli.tune import main

    for module in [name for name in sys.modules if name == "recipes" or name.startswith("recipes.")]:
        del sys.modules[module]
    torch._dynamo.reset()
    # Each takes a process of its own; tests/integration/test_report.py has them made.
    no_pages = contextlib.nullcontext() if makes_pages else without_pages()
    argv = mock.patch.object(sys, "argv", ["tune", *arguments])
    fits = contextlib.nullcontext() if probes_by_speed else all_that_fits()
    with argv, fits, no_pages:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal bit for bit."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_close(ours: Run, theirs: Run, epoch: int = 1, rel: float = 2e-4) -> None:
    """Equal to float rounding: losses, learning rates and weights."""
    assert len(ours.metrics) == len(theirs.metrics)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=rel)
        if "grad_norm" in b:
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * rel)
        assert a["lr"] == b["lr"]
    for name, weights in theirs.weights(epoch).items():
        torch.testing.assert_close(ours.weights(epoch)[name], weights, rtol=1e-2, atol=2e-4)
