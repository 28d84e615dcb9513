"""Published seconds of an optimizer step, and the programs that do what was timed.

Each figure was read where `source` says. `time_rows` returns all that count, `EXCLUDED` what was read and does not,
with reasons that were there before anything was predicted: settings that are not published, or work that is not the
card's. What had to be inferred is in a row's `note`. Where a peak of memory was published with the time, it is here
too: a dry run that comes to the same peak does the same work.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from adaptive_batching._dry_run.cards import Gpu, find_gpus

PROGRAMS = Path(__file__).parent / "published"
H100_HBM2E = "H100 HBM2e"
OLD = ("mpt ", "timm ")  # torch 1.12 to 2.1
FITTED = ("fms Mistral-7B full, 4", "peft lora/rank32", "titan 8")
"""The rows to which three constants were fitted; they do not count."""
GB, GIB, MIB = 10**9, 2**30, 2**20
# Beside LIBRARIES of dry_run.py
LIBRARIES = {
    "timm": ("timm==0.6.13", "torchvision==0.28.0"),
    "timm-1": ("timm==1.0.20", "torchvision==0.28.0"),
}


@dataclass(frozen=True)
class TimedRow:
    """A published time and what takes as long."""

    name: str
    source: str
    """Who published it, and where."""

    card: str
    """As `--gpu` takes it."""

    seconds: float
    """Of one optimizer step."""

    libraries: str | None
    """Key of `LIBRARIES` here or in dry_run.py."""

    arguments: tuple[str, ...]
    """Options of `dry-run` beside the card."""

    program: tuple[str, ...]
    """A script of `published` and its arguments, or a recipe of torchtune and its own."""

    note: str
    """What is not published and was inferred, and what is known to differ."""

    lengths: tuple[int, ...] = ()
    """Where steps differ in length: padded lengths, each of which is run after the first step, as the program's last
    argument. The time is `mean_over_lengths` of theirs."""

    peak_bytes: int = 0
    """Published peak, 0 where there is none."""

    peak_of: str = ""
    """`allocated` or `reserved`."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of `dry-run`, the card among them."""
        return ("--gpu", self.card, *self.arguments)

    @property
    def gpu(self) -> Gpu:
        return find_gpus(self.card)[0]

    @property
    def is_old(self) -> bool:
        """True if torch was older than 2.4, whose products, convolutions and attention were slower: shown apart."""
        return self.name.startswith(OLD)


# --- fms-acceleration -------------------------------------------------------------------------------------------------

_FMS = "IBM, foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/"
_FMS_NOTE = (
    "train_runtime / 100 steps, the first among them; samples are full (tokens a second agree); torch 2.4.1 and "
    "flash-attn 2.7.3 then"
)
# Model, method, samples of a device, devices: train_runtime and peak of what is allocated
_FMS_ROWS = {
    ("Mistral-7B", "full", 4, 1): (534.9538, 72434837504), ("Mistral-7B", "full", 8, 1): (1042.5316, 72435230720),
    ("Mistral-7B", "LoRA", 4, 1): (492.8771, 26704571904), ("Mistral-7B", "LoRA", 8, 1): (977.0384, 38742912512),
    ("PowerLM-3b", "full", 4, 1): (321.2872, 35134836736), ("PowerLM-3b", "full", 8, 1): (627.2531, 47059390976),
    ("PowerLM-3b", "LoRA", 4, 1): (325.5188, 20169870848), ("PowerLM-3b", "LoRA", 8, 1): (641.7595, 33152880128),
    ("Mistral-7B", "full", 2, 2): (294.9755, 36225939968), ("Mistral-7B", "full", 4, 2): (544.5118, 36226136576),
    ("Mistral-7B", "LoRA", 2, 2): (278.0431, 15144870400), ("Mistral-7B", "LoRA", 4, 2): (517.0716, 21959827968),
    ("PowerLM-3b", "full", 2, 2): (178.9566, 17626672128), ("PowerLM-3b", "full", 4, 2): (328.2929, 23781051904),
    ("PowerLM-3b", "LoRA", 2, 2): (205.3199, 10321519104), ("PowerLM-3b", "LoRA", 4, 2): (342.5583, 16819665408),
    ("Mistral-7B", "plain", 4, 1): (455.6536, 16373838336), ("Mistral-7B", "plain", 8, 1): (894.6554, 28412178944),
    ("Mistral-7B", "trl", 4, 1): (564.2301, 20669338112), ("Mistral-7B", "trl", 8, 1): (1096.8531, 37002646016),
    ("PowerLM-3b", "plain", 4, 1): (295.7236, 15151677952), ("PowerLM-3b", "plain", 8, 1): (578.3764, 28134687232),
    ("PowerLM-3b", "trl", 4, 1): (390.2779, 18174161920), ("PowerLM-3b", "trl", 8, 1): (759.0108, 34177070080),
}  # fmt: skip


def _of_fms() -> list[TimedRow]:
    found = []
    for (model, method, size, devices), (runtime, peak) in _FMS_ROWS.items():
        four_bit = method in ("plain", "trl")
        how = {"full": (), "LoRA": ("--lora",)}.get(method, ("--four-bit", method))
        shared = ("--devices", str(devices)) if devices > 1 else ()
        note = _FMS_NOTE
        if four_bit:
            note += "; bitsandbytes 0.43.3; prepared as " + {"plain": "their plugin", "trl": "TRL"}[method] + " does"
        if devices > 1:
            note += "; FSDP as of their accelerate.yaml; which links join the two A100 is not said"
        granite = model == "PowerLM-3b"
        table, libraries = ("a100_80gb_granite", "fms-granite") if granite else ("a100_80gb", "fms-mistral")
        what = f"4-bit LoRA, {method}" if four_bit else method
        found.append(
            TimedRow(
                f"fms {model} {what}, {size}{f' on {devices}' if devices > 1 else ''}", f"{_FMS}{table}.csv",
                "A100 80GB", runtime / 100, libraries, (),
                ("fms_acceleration.py", "--model", model, *how, "--batch-size", str(size), *shared), note,
                peak_bytes=peak, peak_of="allocated",
            )
        )  # fmt: skip
    return found


# --- torchtitan, and torchao with it ----------------------------------------------------------------------------------

# Devices, compiled: tokens a second of a device, GiB reserved
_TITAN_ROWS = {(8, False): (5762, 82.4), (8, True): (6667, 77.0), (128, False): (5605, 67.0), (128, True): (6514, 62.0)}
# Size, activation checkpointing: tokens a second of a device
_TITAN_A100_ROWS = {("8B", "op"): 2973, ("8B", "2"): 2904, ("70B", "full"): 331}
# Length, activation checkpointing, compiled: tokens a second of a device, GiB reserved, page of torchao
_NOCOMPILE, _TRAINING = "torchao/prototype/float8nocompile/README.md", "docs/source/workflows/training.md"
_TORCHAO_ROWS = {
    (4096, "none", False): (5339.0, 53.12, _NOCOMPILE), (4096, "2", False): (4882.4, 40.6, _NOCOMPILE),
    (4096, "full", False): (4502.0, 28.07, _NOCOMPILE), (8192, "op", True): (6150, 47.65, _TRAINING),
}  # fmt: skip


def _of_torchtitan() -> list[TimedRow]:
    found = [
        TimedRow(
            f"titan {devices}{', compiled' if compiled else ''}",
            "PyTorch, pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md", H100_HBM2E,
            2 * 8192 / rate, "torchtitan", (),
            ("torchtitan_llama.py", "--devices", str(devices), *(("--compile",) if compiled else ())),
            "an H100 of 96 GB at 2.4 TB/s and 500 W, 400 Gb/s of network for each; a nightly build of December 2024",
            peak_bytes=round(peak * GIB), peak_of="reserved",
        )
        for (devices, compiled), (rate, peak) in _TITAN_ROWS.items()
    ]  # fmt: skip
    found += [
        TimedRow(
            f"titan A100 {size}, {checkpoint}",
            "PyTorch, pytorch/torchtitan, docs/performance.md until January 2025 (commit 4d88a8a44)", "A100 80GB",
            8192 / rate, "torchtitan", (),
            ("torchtitan_llama.py", "--devices", "64", "--size", size, "--batch-size", "1", "--checkpoint", checkpoint),
            "a nightly build of April 2024; network is not said"
            + ("; selective by layer is taken to be every second" if checkpoint == "2" else ""),
        )
        for (size, checkpoint), rate in _TITAN_A100_ROWS.items()
    ]  # fmt: skip
    return found


def _of_torchao() -> list[TimedRow]:
    return [
        TimedRow(
            f"torchao 8B, {length}, {checkpoint}{', compiled' if compiled else ''}", f"PyTorch, pytorch/ao, {page}",
            H100_HBM2E, length / rate, "torchtitan", (),
            ("torchtitan_llama.py", "--devices", "8", "--batch-size", "1", "--length", str(length),
             "--checkpoint", checkpoint, *(("--compile",) if compiled else ())),
            "memory of 2.4 TB/s, as of Meta's H100 in torchao/testing/training/roofline_utils.py; power is taken to be "
            "as for titan; torch 2.7 or of its time"
            + ("" if page == _TRAINING else "; batch of 1 as in torchtitan's pull request 778"),
            peak_bytes=round(peak * GIB), peak_of="reserved",
        )
        for (length, checkpoint, compiled), (rate, peak, page) in _TORCHAO_ROWS.items()
    ]  # fmt: skip


# --- torchtune --------------------------------------------------------------------------------------------------------

_TUNE_3B = "PyTorch, pytorch/torchtune, README.md, optimization flags (pull request 2003)"
_TUNE_8B = "PyTorch, pytorch/torchtune, README.md, memory and training speed (pull request 1664)"
_CE = "loss._component_=torch.nn.CrossEntropyLoss"
_CHUNKED = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
_ADAMW = ("optimizer._component_=torch.optim.AdamW", "optimizer.fused=True", "optimizer.lr=2e-5")
_AC, _NO_AC = "enable_activation_checkpointing=True", "enable_activation_checkpointing=False"
_OFFLOAD, _NO_OFFLOAD = "enable_activation_offloading=True", "enable_activation_offloading=False"
_STEP = ("batch_size=2", "gradient_accumulation_steps=1")
_FULL_3B = ("full_finetune_single_device", "--config", "llama3_2/3B_full_single_device", *_STEP, "dtype=bf16")
_LORA = ("lora_finetune_single_device", "--config")
_APART = (*_ADAMW, "optimizer_in_bwd=False")
_INSIDE = ("optimizer_in_bwd=True", _CHUNKED, _AC, "compile=True")
_PACKED = (
    "samples are taken to be full, and attention causal: packs have padding at their ends, and masks between samples; "
    "torchtune of late 2024, whose norms scaled in bfloat16"
)
_ADAPTERS = "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False"


def _tune(
    name: str, card: str, rate: float, peak: float, program: tuple[str, ...], note: str, *, length: int,
    source: str,
) -> TimedRow:  # fmt: skip
    return TimedRow(
        f"tune {name}", source, card, 2 * length / rate, None, ("--sequence-length", str(length)), program,
        f"{note}; {_PACKED}", peak_bytes=round(peak * GIB), peak_of="allocated",
    )  # fmt: skip


def _of_torchtune() -> list[TimedRow]:
    ladder = {
        "packed": (7075, 60.0, (*_APART, "compile=False", _CE, _NO_AC, _NO_OFFLOAD)),
        "compiled": (8998, 51.0, (*_APART, "compile=True", _CE, _NO_AC, _NO_OFFLOAD)),
        "chunked cross entropy": (9174, 42.9, (*_APART, "compile=True", _CHUNKED, _NO_AC, _NO_OFFLOAD)),
        "activation checkpointing": (7210, 24.9, (*_APART, "compile=True", _CHUNKED, _AC, _NO_OFFLOAD)),
        "optimizer in backward": (7309, 23.1, (*_ADAMW, *_INSIDE, _NO_OFFLOAD)),
        "activation offloading": (7301, 21.8, (*_ADAMW, *_INSIDE, _OFFLOAD)),
    }
    rows = [
        _tune(f"3B {name}", "A100 80GB", rate, peak, (*_FULL_3B, *settings), "fused AdamW", length=4096,
              source=_TUNE_3B)
        for name, (rate, peak, settings) in ladder.items()
    ]  # fmt: skip
    with_adapters = (*_STEP, *_ADAMW, "compile=True", _CHUNKED, _AC, _OFFLOAD)
    for method, rate, peak in (("lora", 8210, 8.5), ("qlora", 8035, 4.6)):
        recipe = (*_LORA, f"llama3_2/3B_{method}_single_device", *with_adapters)
        rows.append(
            _tune(f"3B {method}", "A100 80GB", rate, peak, recipe, "the published command is of QLoRA",
                  length=4096, source=_TUNE_3B)
        )  # fmt: skip
    compiled = (*_STEP, "compile=True")
    paged = "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"
    low_memory = (_CHUNKED, _AC, _OFFLOAD, "optimizer_in_bwd=True", paged)
    full = ("full_finetune_single_device", "--config", "llama3_1/8B_full_single_device", *compiled)
    lora = (*_LORA, "llama3_1/8B_lora_single_device", *compiled, *_ADAPTERS)
    qlora = (*_LORA, "llama3_1/8B_qlora_single_device", *compiled, _AC, _NO_OFFLOAD,
             "model.lora_attn_modules=[q_proj,v_proj,k_proj,output_proj]")  # fmt: skip
    adapters = "adapters as in the config of 0.3.1"
    of_8b: list[tuple[str, str, float, float, tuple[str, ...], str]] = [
        ("8B full", "RTX 4090", 1650, 18.9, (*full, *low_memory),
         "optimizer and offloading from an answer in issue 2168"),
        ("8B LoRA", "RTX 4090", 3083, 16.2, (*lora, _AC, _OFFLOAD), f"offloading; {adapters}"),
        ("8B QLoRA", "RTX 4090", 2413, 7.4, qlora, adapters),
    ]  # fmt: skip
    for name, card, speed, gib, program, note in of_8b:
        rows.append(_tune(f"{name}, {card}", card, speed, gib, program, note, length=2048, source=_TUNE_8B))
    return rows


# --- PEFT -------------------------------------------------------------------------------------------------------------

# Seconds of 5,000 steps, which are the sum of `train time` in `metrics`; `train_time` of `train_info` has tests of the
# model in it as well. Those that are held out were left when others had been drawn by chance.
_PEFT_ROWS = {
    "adalora/rank32": 712.591, "beft/target-v_proj": 520.386, "boft/default": 3316.787, "c3a/default": 751.271,
    "deft/rank32": 647.391, "deft/rank32-para": 637.412, "delora/rank32": 669.204,
    "fourierft/n_frequency-5000": 1067.362, "full": 1812.971, "glora/default": 669.362, "gralora/rank32": 685.449,
    "hira/rank32": 861.309, "ia3/all-attn-5k": 657.497, "ia3/default": 581.026, "lily/rank140-mlp-a2-b2-s8.0": 871.572,
    "lily/rank896-a2-b2-s2.0": 842.735, "ln_tuning/default": 526.976, "loha/rank32": 953.633,
    "lokr/rank32-factor4": 878.407, "lora/rank10-target-mlp": 665.441, "lora/rank32": 585.191,
    "lora/rank32-lorafa": 775.515, "lora/rank64-rslora": 595.871, "miss/bat": 896.674, "miss/default": 561.299,
    "miss/mini": 574.161, "oft/rank32": 736.461, "osf/rank128": 1485.001, "peanut/rank1-relu-depth0-s32.0": 846.428,
    "prefixtuning": 561.250, "prefixtuning/lr_0.005_zero_init": 557.882, "prefixtuning/tokens50-init_prefix": 531.621,
    "psoft/default": 891.557, "psoft/fast": 750.335, "ptuning/default": 578.756, "pvera/default": 668.204,
    "pvera/rank64": 621.299, "randlora/default": 1013.956, "tinylora/default": 606.965,
    "tinylora/weight-tying": 608.722, "trainable_tokens/sos+eos": 563.704, "unilora/default": 635.959,
    "vblora/default": 775.035, "vera/default": 624.161,
}  # fmt: skip
_PEFT_HELD_OUT = {
    "adaptionprompt": 691.712, "fourierft/default": 1050.247, "glora/vector-paths": 620.864,
    "lora/rank14-target-mlp-bdlora": 797.342, "lora/rank32-dora": 706.613, "lora/rank32-mica": 582.050,
    "lora/rank64": 594.485, "peanut/rank32-relu-depth0-s2.0": 885.790, "prompt_tuning/default": 939.771,
    "prompt_tuning/sample_vocab": 940.974, "road": 610.432,
}  # fmt: skip
HELD_OUT = tuple(f"peft {name}" for name in _PEFT_HELD_OUT)
"""The rows that were predicted for the first time when model and interval were settled; they do not count."""
_FIRST_LENGTH, _LENGTHS = 100, (120, 200, 330)
_SAMPLES, _BUCKET, _TOKENS, _SPREAD = 4, 80, 209.0, 90.0
# What lora/rank32 has allocated at the end of a step, as published, is had by batches of this length on average
_MEAN_PADDED = 224.0


def _of_peft() -> list[TimedRow]:
    path, published = PROGRAMS / "peft_results.json", {**_PEFT_ROWS, **_PEFT_HELD_OUT}
    found = []
    for each in json.loads(path.read_text()):
        if each["name"] not in published:
            continue
        settings = ("--peft", json.dumps(each["peft"])) if each["peft"] else ()
        found.append(
            TimedRow(
                f"peft {each['name']}", "Hugging Face, huggingface/peft, method_comparison/MetaMathQA/results", "L40S",
                published[each["name"]] / 5000, "peft", (),
                ("peft_comparison.py", *settings, *each.get("arguments", ()), "--lengths", str(_FIRST_LENGTH)),
                "batches' lengths: 209.9 tokens a sample are published, how they spread is not; batches are of 4 of 80 "
                "sorted samples; tokenizer's padding on the host is in the time; torch 2.13, as here",
                lengths=_LENGTHS,
            )
        )  # fmt: skip
    return found


def padded_lengths() -> list[float]:
    """Return lengths of PEFT's batches: 80 samples are sorted by length, and each four are padded to their longest."""
    draw = random.Random(0)
    shape = (_TOKENS / _SPREAD) ** 2
    found: list[float] = []
    for _ in range(250):
        samples = [min(max(draw.gammavariate(shape, _TOKENS / shape), 40), 650) for _ in range(_BUCKET)]
        found += sorted(samples, reverse=True)[::_SAMPLES]
    scale = _MEAN_PADDED * len(found) / sum(found)
    return [length * scale for length in found]


def mean_over_lengths(seconds: tuple[float, ...] | list[float]) -> float:
    """Return the mean over all of PEFT's batches, from the seconds at each of `lengths`, by lines between them."""
    times = []
    for length in padded_lengths():
        at = 0 if length < _LENGTHS[1] else 1
        slope = (seconds[at + 1] - seconds[at]) / (_LENGTHS[at + 1] - _LENGTHS[at])
        times.append(seconds[at] + slope * (length - _LENGTHS[at]))
    return sum(times) / len(times)


# --- llm-foundry ------------------------------------------------------------------------------------------------------

_MPT = "MosaicML, mosaicml/llm-foundry, scripts/train/benchmarking/README.md, "
_TRITON = (
    "Triton's attention, for which torch's flash attention stands in: about 8 % of a 7B model's products at 2,048 "
    "tokens; Composer's `speed_monitor` over ten steps"
)
_MPT_NEW = f"October 2023 to January 2024, torch 2.1 (image in sweep.sh); network of nodes is not said; {_TRITON}"
_MPT_OLD = f"May 2023, torch 1.13 (image in submit_benchmarks.py); 1,600 Gb/s between nodes; {_TRITON}"
# Size, devices, length, microbatch, microbatches, activation checkpointing: tokens a second of all
_MPT_ROWS = {
    "H100": {
        ("760m", 16, 2048, 24, 1, False): 1096819, ("1b", 8, 2048, 14, 1, False): 363645,
        ("1b", 64, 2048, 20, 1, False): 2841754, ("3b", 16, 2048, 10, 3, False): 386285,
        ("3b", 8, 512, 40, 6, False): 223721, ("7b", 8, 2048, 6, 1, False): 85144,
        ("7b", 512, 2048, 6, 1, False): 4951479, ("13b", 64, 2048, 2, 1, False): 307209,
        ("30b", 16, 2048, 10, 3, True): 36209, ("70b", 128, 2048, 8, 1, True): 135490,
    },
    "A100-40GB": {
        ("125m", 8, 2048, 26, 3, False): 1090678, ("350m", 8, 2048, 16, 4, False): 447963,
        ("1b", 8, 2048, 8, 8, False): 154171, ("7b", 8, 2048, 12, 4, True): 29436,
        ("13b", 32, 2048, 14, 1, True): 63946,
    },
}  # fmt: skip


def _of_mpt() -> list[TimedRow]:
    found = []
    for card, rows in _MPT_ROWS.items():
        for (size, devices, length, microbatch, accumulate, checkpoint), rate in rows.items():
            more = (*(("--checkpoint",) if checkpoint else ()), *(("--pure",) if card == "A100-40GB" else ()))
            found.append(
                TimedRow(
                    f"mpt {size}, {length}, {devices} {card}",
                    _MPT + ("H100 80GB BF16" if card == "H100" else "A100 40GB with 1600 Gbps"), card,
                    devices * microbatch * accumulate * length / rate, None, (),
                    ("mpt.py", "--size", size, "--devices", str(devices), "--microbatch", str(microbatch),
                     "--accumulate", str(accumulate), "--length", str(length), *more),
                    _MPT_NEW if card == "H100" else _MPT_OLD,
                )
            )  # fmt: skip
    return found


# --- LitGPT -----------------------------------------------------------------------------------------------------------


def _of_litgpt() -> list[TimedRow]:
    # Devices: milliseconds of an iteration, GB allocated
    return [
        TimedRow(
            f"litgpt TinyLlama on {devices}", "Lightning AI, Lightning-AI/litgpt, extensions/thunder/README.md (Eager)",
            "A100-40GB", milliseconds / 1000, None, (),
            ("tiny_llama.py", "--devices", str(devices)),
            "a nightly build of torch 2.4 of April 2024; timed once, at the tenth step"
            + ("" if devices > 1 else ": the microbatch of 128 in which the optimizer steps"),
            peak_bytes=round(gigabytes * GB), peak_of="allocated",
        )
        for devices, milliseconds, gigabytes in ((1, 447.65, 29.84), (8, 456.57, 22.13))
    ]  # fmt: skip


# --- timm -------------------------------------------------------------------------------------------------------------

# Batch, milliseconds of a step
_TIMM_ROWS = {
    "resnet50": (512, 419.528), "resnet101": (256, 340.74), "vgg16": (384, 702.994), "efficientnet_b0": (512, 291.183),
    "convnext_base": (128, 376.119), "vit_tiny_patch16_224": (512, 221.804), "vit_base_patch16_224": (192, 487.729),
    "vit_large_patch16_224": (64, 544.512), "swin_base_patch4_window7_224": (128, 453.662),
    "mixer_b16_224": (256, 459.152),
}  # fmt: skip


def _of_timm() -> list[TimedRow]:
    return [
        TimedRow(
            f"timm {model}",
            "Ross Wightman, huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv",
            "RTX 3090", milliseconds / 1000,
            "timm", (), ("images.py", model, str(size)),
            "torch 1.12 and cuDNN of then; timm 0.6.6 then, 0.6.13 here; SGD's settings are its benchmark's defaults",
        )
        for model, (size, milliseconds) in _TIMM_ROWS.items()
    ]  # fmt: skip


# --- torchao's vision transformers ------------------------------------------------------------------------------------

_GIANT = ("vit_giant_patch14_dinov2", "32", "--full-bfloat16", "--checkpoint")
# Seconds of a step, GB allocated
_VIT_ROWS = {
    "ViT-H, fused AdamW": (8 / 41.9, 12.23, ("vit_huge_patch14_224", "8", "--compile")),
    "ViT-H, 8-bit AdamW": (8 / 43.6, 8.32, ("vit_huge_patch14_224", "8", "--compile", "--bits8")),
    "ViT-giant": (1.27, 9.82, _GIANT), "ViT-giant, compiled": (1.18, 9.90, (*_GIANT, "--compile")),
}  # fmt: skip


def _of_torchao_images() -> list[TimedRow]:
    note = "torch 2.4; timm of then is not said; fused AdamW is the script's own"
    return [
        TimedRow(
            f"torchao {name}", "PyTorch (gau-nernst), pytorch/ao, torchao/optim/README.md", "RTX 4070 Ti Super",
            seconds, "timm-1", (), ("low_bit_adam.py", *arguments), note,
            peak_bytes=round(peak * GB), peak_of="allocated",
        )
        for name, (seconds, peak, arguments) in _VIT_ROWS.items()
    ]  # fmt: skip


EXCLUDED = {
    "torchtune 8B LoRA on an A6000, 4699 tokens/s": "its products alone would take 97 % of the data sheet's peak, at "
    "300 watts: it is another run than what is said of it",
    "torchtune 8B full on an A6000, 2579 tokens/s": "37.4 GiB is not the low-memory setup of the row above it in its "
    "table, and its optimizer is not said",
    "torchtune 3B, 8-bit AdamW, 6960 tokens/s": "whose 8-bit AdamW is not said",
    "torchtune 3B baseline, 2091 tokens/s": "samples are not packed, and how many tokens they have is not said",
    "torchtune 70B full on 8 A100, 1568 tokens/s": "the optimizer steps on the host",
    "torchtune 70B LoRA and 405B QLoRA on 8 A100": "tokens a second of a device or of all, and which A100, is not said",
    "torchtune 0.2, Llama 2 (pull request 955)": "neither packing nor accumulation is said",
    "torchtitan, H200, TPS 10,938 and 10,753": "float8 products, of torchao of then",
    "torchtitan, float8, TP, CP and PP": "float8 products",
    "torchtitan, Llama 2 on 64 A100": "torchtitan 0.1.0 has no Llama 2",
    "torchtitan, vanilla and async TP in bfloat16": "tensor parallelism of a later torchtitan; symmetric memory",
    "torchao, float8, MXFP8 and INT8": "products in less than 16 bits",
    "torchao, 8 B200, 8307.5 tokens/s": "limited power, of which no more is said",
    "torchao, Llama 2 1B on an RTX 4090, 17k tokens/s": "two digits",
    "torchao, Llama 2 7B on an A100, 3200 tokens/s": "lengths of samples are not said",
    "torchao, its own and others' low-bit optimizers, CPU offload": "kernels of their own; work of the host",
    "Qwen, README.md, profiling of speed": "how samples are padded, and which of flash-attn's parts run, is not said",
    "NeMo AutoModel, performance summary": "kernels of Transformer Engine",
    "litgpt, replicated on 8, 569.46 ms": "torch's fake group returns nothing that DDP could wait for",
    "litgpt, Thunder's rows": "kernels of nvFuser",
    "litgpt, tutorials/resource-tables.md": "Alpaca's samples of unpublished lengths; minutes with two decimals",
    "nanoGPT, 250 and 135 ms": "neither card nor program nor batch is said with the times, of December 2022",
    "llm-foundry, samples of 4,096 tokens and more": "Triton's attention is a large part of their time",
    "llm-foundry, FP8": "products of Transformer Engine",
    "llm-foundry, SHARD_GRAD_OP on 128 and more": "of January 2024; one set-up of FSDP is enough of one source",
    "fms-acceleration, foak and GPTQ": "kernels of its own",
    "fms-acceleration, 4-bit on two devices": "weights stored as bfloat16 are quantized and sharded by the host",
    "timm, other models and NCHW": "ten models are enough of one source",
}


def time_rows() -> list[TimedRow]:
    return [
        *_of_fms(), *_of_torchtitan(), *_of_torchao(), *_of_torchtune(), *_of_peft(), *_of_mpt(), *_of_litgpt(),
        *_of_timm(), *_of_torchao_images(),
    ]  # fmt: skip


times = time_rows()
