"""A stock recipe set up on the meta device by its own set-up, so that whatever option it knows is in the plan."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training, utils
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.modules import RotaryPositionalEmbeddings
from torchtune.modules.peft import DoRALinear, get_adapter_params
from torchtune.training import _activation_offloading

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.stock import host as hosts
from adaptive_batching._torchtune.stock import stand_ins
from adaptive_batching._torchtune.stock.data import Sample, SampleLoader
from adaptive_batching._torchtune.stock.learning_rate import scheduled_rates
from adaptive_batching._torchtune.stock.loading import load_stock, replaced_in_torchtune, stock_recipe
from adaptive_batching._torchtune.stock.losses import (
    ANSWERS,
    accept_configs_of_torchao,
    distillation,
    fake_quantized,
    next_token,
    preferences,
)
from adaptive_batching._torchtune.stock.objective import Objective, StockParts
from adaptive_batching._torchtune.train.settings import read_settings
from adaptive_batching._trace.reserved import SetUp

RECIPES: Mapping[str, Callable[[StockParts], Objective]] = {
    **{f"{kind}_finetune_{on}": next_token for on in ("single_device", "distributed") for kind in ("full", "lora")},
    **dict.fromkeys(("lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_distributed"), preferences),
    **{f"knowledge_distillation_{on}": distillation for on in ("single_device", "distributed")},
    "qat_distributed": fake_quantized,
    "qat_lora_finetune_distributed": next_token,
}
"""Stock recipes that can be set up on paper, and what makes their objectives."""


@dataclass(frozen=True)
class Data:
    """The data of a run on paper: samples of one length."""

    length: int  # tokens of a sample
    samples: int
    packed: bool = False
    pairs: bool = False  # of answers, both of that length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        tokens = [1] * self.length
        if self.pairs:
            return {f"{kind}_{part}": list(tokens) for kind in ANSWERS for part in ("input_ids", "labels")}
        sample: Sample = {"tokens": tokens, "labels": list(tokens)}
        if self.packed:
            sample = {key: torch.tensor(value) for key, value in sample.items()}
            sample |= {"input_pos": torch.arange(self.length), "seq_lens": torch.tensor([self.length])}
        return sample


def make_data(tokenizer: Any, **fields: Any) -> Data:
    """Stand in for a builder of data sets."""
    return Data(**fields)


def set_up(
    recipe: str, cfg: DictConfig, data: Data, devices: int = 1, allocations: Allocations | None = None
) -> tuple[hosts.Host, hosts.StockRun]:
    """Set a stock recipe of :data:`RECIPES` up on the meta device; what stock raises about the config comes through.

    A ``device`` other than ``cpu`` in the config stands for CUDA. Several ``devices`` need a group: :func:`on_devices`.
    """
    stock, base, make_objective = load_stock(recipe), stock_recipe(recipe), RECIPES[recipe]
    planned = type(base.__name__, (_OnPaper, base), {})
    cfg = _without_files(cfg, replace(data, pairs=make_objective is preferences))
    accept_configs_of_torchao()
    allocations = allocations or Allocations()
    with torch.random.fork_rng(devices=[]), quiet(), _without_device(stock, allocations):
        planned_recipe: Any = planned(cfg)
        planned_recipe._device = torch.device("meta")
        with contextlib.nullcontext() if devices > 1 else allocations:
            planned_recipe.setup(cfg)
    host = hosts.host_of(
        planned_recipe,
        Ranks(alone=True),
        planned_recipe.backward_optimizers,
        lambda parts: make_objective(replace(parts, num_ranks=devices)),
    )
    if planned_recipe.enabled:
        host.objective.leave_stock()
    if cfg.device == "cpu":  # torch loops over parameters there, where the config leaves it open
        for group in (group for optimizer in host.optimizers for group in optimizer.param_groups):
            if group.get("foreach", ...) is None and group.get("fused") is None:
                group["foreach"] = False
    steps = planned_recipe.total_epochs * planned_recipe._steps_per_epoch
    # Stock may have no schedule.
    rates = planned_recipe.rates or scheduled_rates(None, steps, hosts.initial_learning_rate(planned_recipe))
    return host, hosts.run_of(planned_recipe, int(cfg.batch_size), rates)


@contextlib.contextmanager
def on_devices(count: int) -> Iterator[None]:
    """Have a process group of ``count`` ranks inside, of which this process is the first and only one."""
    if count == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _OnPaper:
    """Mixed into a stock recipe, in front of it."""

    _model: nn.Module  # set by the stock recipe

    def __init__(self, cfg: DictConfig) -> None:
        self.backward_optimizers = hosts.OptimizersInBackward()
        self.rates: list[float] = []
        self.enabled = read_settings(cfg, warns=False).enabled
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        if hasattr(self, "_checkpoint_client"):
            self._checkpoint_client = mock.Mock(load_base_checkpoint=lambda: {training.MODEL_KEY: {}})

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {training.MODEL_KEY: {}}

    # As other recipes call it
    _load_checkpoint = _load_ref_checkpoint = load_teacher_checkpoint = load_checkpoint

    def _setup_data(self, *, cfg_dataset: DictConfig, **kwargs: Any) -> Any:
        loaders = super()._setup_data(cfg_dataset=cfg_dataset, **kwargs)  # type: ignore[misc]
        sampler, stock_loader = loaders if isinstance(loaders, tuple) else (None, loaders)  # as the recipe has it
        loader = SampleLoader(stock_loader, drops_last=self.enabled or stock_loader.drop_last)
        if loader.dataset.packed:
            loader.collate = _collate_packs
        return loader if sampler is None else (sampler, loader)

    def _setup_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with replaced_in_torchtune(register_optim_in_bwd_hooks=self.backward_optimizers.register):
            return super()._setup_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _setup_lr_scheduler(self, *, num_training_steps: int, **kwargs: Any) -> Any:
        initial = hosts.initial_learning_rate(self)
        self.rates = scheduled_rates(kwargs["cfg_lr_scheduler"], num_training_steps, initial)
        return super()._setup_lr_scheduler(num_training_steps=num_training_steps, **kwargs)  # type: ignore[misc]


def _collate_packs(samples: list[Sample]) -> dict[str, torch.Tensor]:
    # Without the mask, which on CUDA is one of blocks; see :func:`step.without_block_mask`
    return {key: torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "input_pos")}


def _without_files(cfg: DictConfig, data: Data) -> DictConfig:
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.metric_logger = {"_component_": "unittest.mock.Mock"}
    length = cfg.tokenizer.get("max_seq_len")
    cfg.tokenizer = {"_component_": "types.SimpleNamespace", "max_seq_len": length, "pad_id": 0}
    cfg.dataset = {"_component_": "adaptive_batching._torchtune.plan.meta_setup.make_data", **asdict(data)}
    cfg.resume_from_checkpoint = False
    cfg.optimizer = stand_ins.without_kernels(cfg.optimizer)
    cfg.pop("profiler", None)
    return cfg


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Have nothing logged inside but errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what a set-up allocates and frees, in order: by operations under it on the meta device, or as it is told.

    On one device a model is made there, and weights are copied into it; those in NF4 come as they were, and are
    quantized there (``copy_`` in ``torchao/dtypes/nf4tensor.py``). On several devices each weight is whole for a
    moment, before its shard is cut out of it (``_broadcast_state_dict`` in ``torch/distributed/_state_dict_utils.py``).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._known: dict[Hashable, tuple[list[int], list[int]]] = {}

    def so_far(self, *, empties_cache: bool = False) -> SetUp:
        return SetUp(tuple(self._events), tuple(self._sizes), empties_cache)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors on the meta device that have not been seen, until they die."""
        for storage in (storage for tensor in tensors for storage in get_untyped_storages(tensor)):
            key, size = storage._cdata, storage.nbytes()
            if size and key not in self._seen and storage.device.type == "meta":
                number = self._take(size)
                self._seen[key] = weakref.ref(storage, lambda _, key=key, number=number: self._free(key, number))  # type: ignore[misc]

    def load(self, model: nn.Module, *, on_host: bool = False) -> None:
        """Note what loading the weights of a model takes; ``on_host`` where its shards are kept there."""
        adapters = get_adapter_params(model)  # not in the checkpoint
        if not on_host:
            self.hold(parameter.to_local() for parameter in adapters.values() if isinstance(parameter, DTensor))
        for name, parameter in sorted(model.named_parameters()):
            if name in adapters:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            is_sharded, gathered = local is not parameter, None
            if isinstance(local, NF4Tensor):
                self._repeat(parameter.shape, partial(_quantize, parameter.shape, local))
            elif is_sharded:
                gathered = self._take(parameter.numel() * parameter.element_size())
            if is_sharded and on_host:
                for storage in get_untyped_storages(local):
                    self._events.append(~self._take(storage.nbytes()))
            elif is_sharded:
                self.hold([local])
            if gathered is not None:
                self._events.append(~gathered)

    def start_dora(self, layer: Any) -> None:
        """Note what the first magnitude of a DoRA layer takes (``initialize_dora_magnitude``)."""

        def norm() -> None:
            lora = layer.lora_b.weight @ layer.lora_a.weight
            layer._get_weight_norm(layer.weight.to(lora.dtype), lora)

        with torch.no_grad():
            self._repeat(("dora", layer.weight.shape), norm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(value for value in tree_iter(out) if isinstance(value, torch.Tensor))
        return out

    def _repeat(self, key: Hashable, function: Callable[[], None]) -> None:
        """Note what a function allocates that leaves nothing behind; it is called once for a key."""
        start, first = len(self._events), len(self._sizes)
        if key in self._known:
            events, sizes = self._known[key]
            self._events += _shifted(events, first)
            self._sizes += sizes
        else:
            with self:
                function()
            self._known[key] = _shifted(self._events[start:], -first), self._sizes[first:]

    def _take(self, size: int) -> int:
        self._sizes.append(size)
        self._events.append(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _free(self, key: int, number: int) -> None:
        self._seen.pop(key, None)
        self._events.append(~number)


def _quantize(shape: torch.Size, like: Any) -> None:
    gathered = torch.empty(shape, dtype=like.dtype, device="meta")
    NF4Tensor.from_tensor(gathered, like.block_size, like.scaler_block_size)


def _shifted(events: list[int], by: int) -> list[int]:
    return [event + by if event >= 0 else event - by for event in events]


@contextlib.contextmanager
def _without_device(stock: ModuleType, allocations: Allocations) -> Iterator[None]:
    """Replace, inside, what a set-up asks of devices, of other ranks and of stored weights."""
    shard_model = training.shard_model
    on_device = contextlib.ExitStack()

    def shard(*args: Any, dp_mesh: Any = None, **kwargs: Any) -> None:
        mesh = dp_mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        shard_model(*args, dp_mesh=mesh, **kwargs)
        on_device.enter_context(allocations)  # from here until weights are loaded: rotary embeddings and adapters

    def ignore(*args: Any, **kwargs: Any) -> Any:
        return _IncompatibleKeys([], [])

    def load(model: nn.Module, *args: Any, cpu_offload: bool = False, **kwargs: Any) -> Any:
        on_device.close()
        allocations.hold(model.buffers())  # of what is sharded, and was made without a device
        allocations.load(model, on_host=cpu_offload)
        return _IncompatibleKeys([], [])

    def start_dora(layer: Any) -> None:
        if not isinstance(layer.weight, DTensor):
            allocations.start_dora(layer)

    def build_unscaled(rope: Any) -> None:  # meta tensors lack the values that it would be scaled by
        RotaryPositionalEmbeddings.rope_init(rope)
        rope.is_cache_built = True

    replaced: list[tuple[Any, str, Any]] = [
        (training, "get_dtype", lambda dtype, device=None: training.precision.PRECISION_STR_TO_DTYPE[dtype or "fp32"]),
        (training, "get_memory_stats", lambda *args, **kwargs: {}),
        (training, "log_memory_stats", ignore),
        (training, "load_from_full_model_state_dict", load),
        (training, "validate_no_params_on_meta_device", ignore),
        (training, "shard_model", shard),
        (utils, "get_device", lambda device=None: torch.device(device or "cuda")),
        (nn.Module, "load_state_dict", load),
        (DoRALinear, "initialize_dora_magnitude", start_dora),
        (Llama3ScaledRoPE, "rope_init", build_unscaled),
        (_activation_offloading, "OffloadActivations", stand_ins.TracedOffloading),
        (stock, "init_process_group", ignore),
        (stock, "init_device_mesh", lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)),
        (dist, "barrier", ignore),
    ]
    with stand_ins.without_torchvision(), on_device, contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            if owner is not stock or hasattr(stock, name):
                stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def make_on_paper(recipe: str, cfg: DictConfig) -> None:
    """Make a stock recipe of :data:`RECIPES`, not set up; what stock raises about the config comes through."""
    devices = max(2, cfg.get("tensor_parallel_dim", 1)) if recipe.endswith("distributed") else 1
    on_paper = _without_device(load_stock(recipe), Allocations())
    with torch.random.fork_rng(devices=[]), quiet(), on_devices(devices), on_paper:
        stock_recipe(recipe)(copy.deepcopy(cfg))
