"""Find the checkpoint that a run goes on from: the folders of weights or adapters that its stored state belongs to.

Stock takes the adapters of the last epoch's folder, which need not be those of the state, and of a fully fine-tuned
model it has to be told the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune.training.checkpointing import _utils

from adaptive_batching._torchtune.checkpoints import STATE_NAME, epoch_of, state_of_epoch, states_of_steps
from adaptive_batching._torchtune.stock import replaced_in
from adaptive_batching._values import ConfigError


@contextlib.contextmanager
def from_last_checkpoint(cfg: DictConfig) -> Iterator[None]:
    """Have stock load, inside, the last checkpoint, or the one that the config names; ``checkpointer`` is set so."""
    own, output_dir = cfg.checkpointer, Path(cfg.checkpointer.output_dir)
    named = _named_folder(own, output_dir)
    state = _state(own, output_dir, named)
    folder = _folder_of(state, output_dir)
    if folder is None or (named is not None and named != folder):  # the user knows better
        yield
        return
    if state.parent == folder:
        OmegaConf.update(cfg, "checkpointer.recipe_checkpoint", f"{folder.name}/{STATE_NAME}", force_add=True)
    files = sorted(f"{folder.name}/{path.name}" for path in folder.glob("model-*"))
    if named is None and files and not list(folder.glob("adapter_model*")):
        OmegaConf.update(cfg, "checkpointer.checkpoint_files", files, force_add=True)
    # Where stock looks for adapters. It fails where no folder is that of an epoch.
    with replaced_in(_utils, get_largest_iter_folder=lambda *args, **kwargs: folder.name):
        yield


def refuse_step_checkpoints(cfg: DictConfig) -> None:
    """Refuse to resume from a checkpoint within an epoch with the loop of stock, which would begin the epoch again."""
    output_dir, named = Path(cfg.checkpointer.output_dir), Path(cfg.checkpointer.get("recipe_checkpoint") or "").parent
    of_steps = states_of_steps(output_dir)
    if named.name.startswith("step_") or (of_steps and not state_of_epoch(output_dir).exists()):
        raise ConfigError(
            f"resume_from_checkpoint=True without save_every_n_steps, and the checkpoints in {str(output_dir)!r} were "
            f"saved within an epoch; set save_every_n_steps as in the run to resume"
        )


def take_value_model_of(policy: DictConfig, value: DictConfig) -> None:
    """Have the value model, which stock starts anew, go on where the policy does, unless the config names another."""
    files = policy.checkpoint_files
    name = Path(str(files[0])).parent.name if OmegaConf.is_list(files) and files else ""
    output_dir = Path(value.output_dir)
    if not name or output_dir.resolve() in Path(value.checkpoint_dir).resolve().parents:
        return
    found = sorted(path.name for path in (output_dir / name).glob("model-*"))
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint=True, and the policy goes on from {name}, of which value_checkpointer.output_dir="
            f"{value.output_dir!r} has no value model; set it to that of the run to resume"
        )
    value.checkpoint_dir, value.checkpoint_files = str(output_dir / name), found


def _named_folder(own: DictConfig, output_dir: Path) -> Path | None:
    files = own.get("checkpoint_files")
    names: Sequence[Any] = [own.get("adapter_checkpoint"), *(files if OmegaConf.is_list(files) else [])]
    for name in names:
        path = output_dir / str(name or "")
        if name and path.parent != output_dir and path.exists():
            return path.parent
    return None


def _state(own: DictConfig, output_dir: Path, named: Path | None) -> Path:
    """Return the file of the state to go on from."""
    if own.get("recipe_checkpoint"):
        return output_dir / str(own.recipe_checkpoint)
    of_epoch, of_steps = state_of_epoch(output_dir), states_of_steps(output_dir)
    if named is not None and named.name.startswith("step_"):
        if not (named / STATE_NAME).exists():
            last = f"; the last that can be resumed from is {of_steps[-1].parent.name}" if of_steps else ""
            raise ConfigError(
                f"resume_from_checkpoint=True with a file of {named.name} in checkpointer: that folder holds weights "
                f"alone{last}. Leave checkpointer.checkpoint_files and adapter_checkpoint as for a new run to take "
                f"the last"
            )
        return named / STATE_NAME
    found = [path for path in (of_epoch, *of_steps) if path.is_file()]
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint=True, and checkpointer.output_dir={str(output_dir)!r} has no checkpoint to go on "
            f"from; set output_dir to that of the run to resume, or resume_from_checkpoint=False"
        )
    return of_epoch if named is not None else max(found, key=lambda path: path.stat().st_mtime_ns)


def _folder_of(state: Path, output_dir: Path) -> Path | None:
    """Return the folder of the weights that ``state`` belongs to, if it is there."""
    if state.parent.name.startswith("step_"):
        return state.parent
    epoch = epoch_of(state)  # if it has none, stock says what is wrong with it
    folder = output_dir / f"epoch_{epoch}"
    return folder if epoch is not None and folder.is_dir() else None
