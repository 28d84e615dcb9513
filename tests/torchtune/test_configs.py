"""Configs: ours are complete, and stock's can be used with ours by name."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import _recipe_registry
from torchtune.config import instantiate
from torchtune.config._utils import _get_component_from_path

from adaptive_batching._torchtune.stock.on_paper import make_on_paper
from adaptive_batching._torchtune.train.settings import FIELDS, read_settings
from adaptive_batching.torchtune import load_stock
from tests.conftest import ROOT
from tests.support.planned_batches import ADAPTIVE, request_of

OURS = sorted((ROOT / "recipes" / "configs").glob("**/*.yaml"))
EACH = pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "__init__")
STOCK_CONFIGS = Path(load_stock("full_finetune_single_device").__file__ or "").parent / "configs"


@EACH
def test_our_configs_are_valid_and_read_and_say_how_to_launch_them(path: Path) -> None:
    cfg = OmegaConf.load(path)
    assert read_settings(cfg).enabled
    for component in re.findall(r"_component_: (\S+)", path.read_text()):
        is_there = component.split(".")[0] != "bitsandbytes" or find_spec("bitsandbytes")
        assert not is_there or callable(_get_component_from_path(component))
    header = path.read_text().split("\n\n")[0]
    launched = re.search(r"adaptive-batching run (?:--nproc_per_node \d+ )?(\S+) --config (\S+)", header)
    assert launched and (ROOT / "recipes" / f"{launched[1]}.py").exists()
    assert ROOT / "recipes" / "configs" / f"{launched[2]}.yaml" == path

    source = Path(load_stock(request_of(path).recipe).__file__ or "").read_text()
    for key in map(str, cfg):
        is_read = re.search(rf'cfg\.{key}\b|cfg\.get\(\s*"{key}"', source) or key == "profiler"
        assert is_read or key in FIELDS or f"${{{key}}}" in path.read_text(), key


@pytest.mark.parametrize("path", ADAPTIVE, ids=lambda path: path.stem)
def test_stock_takes_our_config(path: Path) -> None:
    request = request_of(path)
    make_on_paper(request.recipe, request.cfg)
    with torch.device("meta"):
        assert instantiate(request.cfg.model) is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_stock_config_of_a_recipe_works_with_ours(recipe: str) -> None:
    [stock] = [r for r in _recipe_registry.get_all_recipes() if r.name == recipe]
    assert stock.configs
    for config in stock.configs:
        cfg = OmegaConf.load(STOCK_CONFIGS / config.file_path)
        assert not read_settings(cfg).enabled, config.name
        cfg.use_maximum_batch_size = True
        cfg.adaptive_batching = {"memory_limit": "40GiB", "max_batch_size": 1024}
        assert read_settings(cfg).enabled, config.name


def test_a_recipe_that_torchtune_does_not_ship_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no recipe 'full_finetune_everywhere'"):
        load_stock("full_finetune_everywhere")
