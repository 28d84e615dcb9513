"""NVIDIA's cards, by the names that people type."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

from adaptive_batching._values import ConfigError, MemoryAmount

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    """Total memory that CUDA reports on Linux, less what error correction and the driver reserve.

    From out-of-memory messages ("GPU 0 has a total capacity of"), ``torch.cuda.get_device_properties`` and Ultralytics'
    first line, as people quote them in issues, logs and notebooks. Drivers differ by some 0.2 GiB, and the lowest are
    taken. Workstation cards are listed as they come, with error correction off; with it, they report 6 % less.
    """

    peak_tflops: float
    """Dense bfloat16 products summed in float32, from NVIDIA's data sheets; float16 before Ampere, where tensor
    cores do not take bfloat16."""

    capability: tuple[int, int] = (8, 0)
    processors: int = 108
    """Streaming multiprocessors."""

    bandwidth: float = 2039
    """Gigabytes a second of its memory; this and what follows are from NVIDIA's data sheets and white papers."""

    cache_mib: float = 40
    """Level 2 cache."""

    watts: float = 400
    single_tflops: float = 19.5
    """Float32 products outside of tensor cores."""

    link: float | None = None
    """Gigabytes a second to the other GPUs of a machine, one way, by NVLink; None: they share the bus of the host."""

    network: float = 50
    """Gigabytes a second to GPUs of other machines, one way: 400 gigabits for each, as cloud machines have."""

    @property
    def device_name(self) -> str:
        """The name that the driver gives, which scripts and libraries look at."""
        if self.name in _DEVICE_NAMES:
            return _DEVICE_NAMES[self.name]
        model = re.sub(r"-\d+GB$", "", self.name).replace("Super", "SUPER")
        return f"NVIDIA GeForce {model}" if re.match(r"RTX \d0[5-9]0\b", model) else f"NVIDIA {model}"

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def bus(self) -> float:
        """Gigabytes a second to the host, one way: sixteen lanes of PCI Express 3, 4 or 5 after their overhead."""
        return 13.0 if self.capability < (8, 0) else 26.0 if self.capability < (9, 0) else 52.0


TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)
# SXM cards, unless their names say PCIe. Two PCIe cards may be joined by a bridge of NVLink, which is not counted.
GPUS = [
    Gpu("T4", 14.56, 65, TURING, 40, 320, 4, 70, 8.1),
    Gpu("P100", 15.88, 19, (6, 0), 56, 732, 4, 250, 9.3),
    Gpu("V100-16GB", 15.77, 125, (7, 0), 80, 900, 6, 300, 15.7, 150),
    Gpu("V100-32GB", 31.73, 125, (7, 0), 80, 900, 6, 300, 15.7, 150),
    Gpu("V100-PCIe-16GB", 15.77, 112, (7, 0), 80, 900, 6, 250, 14),
    Gpu("V100-PCIe-32GB", 31.73, 112, (7, 0), 80, 900, 6, 250, 14),
    Gpu("A10", 21.99, 125, AMPERE, 72, 600, 6, 150, 31.2),
    Gpu("A10G", 21.99, 70, AMPERE, 80, 600, 6, 300, 35),
    Gpu("L4", 21.95, 121, ADA, 58, 300, 48, 72, 30.3),
    Gpu("RTX 3090", 23.56, 71, AMPERE, 82, 936, 6, 350, 35.6),
    Gpu("RTX 4090", 23.52, 165, ADA, 128, 1008, 72, 450, 82.6),
    Gpu("RTX 5090", 31.35, 210, BLACKWELL, 170, 1792, 96, 575, 104.8),
    Gpu("A6000", 47.4, 155, AMPERE, 84, 768, 6, 300, 38.7),
    Gpu("L40S", 44.4, 362, ADA, 142, 864, 96, 350, 91.6),
    Gpu("A100-40GB", 39.39, 312, (8, 0), 108, 1555, 40, 400, 19.5, 300),
    Gpu("A100-80GB", 79.15, 312, (8, 0), 108, 2039, 40, 400, 19.5, 300),
    Gpu("A100-PCIe-40GB", 39.39, 312, (8, 0), 108, 1555, 40, 250, 19.5),
    Gpu("A100-PCIe-80GB", 79.15, 312, (8, 0), 108, 1935, 40, 300, 19.5),
    Gpu("H100", 79.1, 989, HOPPER, 132, 3350, 50, 700, 67, 450),
    Gpu("H100 PCIe", 79.1, 756, HOPPER, 114, 2000, 50, 350, 51),
    # Of 96 GB and 500 watts, as in torchtitan's published runs (benchmarks/llama3_h100_202412_torchtitan.md)
    Gpu("H100 HBM2e", 95, 989, HOPPER, 132, 2400, 50, 500, 67, 450),
    Gpu("H200", 139.8, 989, HOPPER, 132, 4800, 50, 700, 67, 450),
    Gpu("B200", 178.35, 2250, (10, 0), 148, 8000, 126, 1000, 75, 900),
    # GeForce: half the rate of the chip where sums are in float32
    Gpu("RTX 2060", 5.61, 26, TURING, 30, 336, 3, 160, 6.5),
    Gpu("RTX 2070", 7.6, 30, TURING, 36, 448, 4, 175, 7.5),
    Gpu("RTX 2070 Super", 7.6, 36, TURING, 40, 448, 4, 215, 9.1),
    Gpu("RTX 2080", 7.6, 40, TURING, 46, 448, 4, 215, 10.1),
    Gpu("RTX 2080 Super", 7.6, 45, TURING, 48, 496, 4, 250, 11.2),
    Gpu("RTX 2080 Ti", 10.57, 54, TURING, 68, 616, 5.5, 250, 13.4),
    Gpu("Titan RTX", 23.64, 130, TURING, 72, 672, 6, 280, 16.3),
    Gpu("RTX 3060", 11.63, 26, AMPERE, 28, 360, 3, 170, 12.7),
    Gpu("RTX 3060 Ti", 7.66, 32, AMPERE, 38, 448, 4, 200, 16.2),
    Gpu("RTX 3070", 7.66, 41, AMPERE, 46, 448, 4, 220, 20.3),
    Gpu("RTX 3070 Ti", 7.66, 43, AMPERE, 48, 608, 4, 290, 21.7),
    Gpu("RTX 3080-10GB", 9.64, 60, AMPERE, 68, 760, 5, 320, 29.8),
    Gpu("RTX 3080-12GB", 11.63, 61, AMPERE, 70, 912, 6, 350, 30.6),
    Gpu("RTX 3080 Ti", 11.63, 68, AMPERE, 80, 912, 6, 350, 34.1),
    Gpu("RTX 3090 Ti", 23.55, 80, AMPERE, 84, 1008, 6, 450, 40),
    Gpu("RTX 4060", 7.63, 30, ADA, 24, 272, 24, 115, 15.1),
    Gpu("RTX 4060 Ti-8GB", 7.62, 44, ADA, 34, 288, 32, 160, 22.1),
    Gpu("RTX 4060 Ti-16GB", 15.57, 44, ADA, 34, 288, 32, 165, 22.1),
    Gpu("RTX 4070", 11.59, 58, ADA, 46, 504, 36, 200, 29.1),
    Gpu("RTX 4070 Super", 11.59, 71, ADA, 56, 504, 48, 220, 35.5),
    Gpu("RTX 4070 Ti", 11.59, 80, ADA, 60, 504, 48, 285, 40.1),
    Gpu("RTX 4070 Ti Super", 15.57, 88, ADA, 66, 672, 48, 285, 44.1),
    Gpu("RTX 4080", 15.57, 97, ADA, 76, 717, 64, 320, 48.7),
    Gpu("RTX 4080 Super", 15.57, 104, ADA, 80, 736, 64, 320, 52.2),
    Gpu("RTX 5060", 7.5, 38, BLACKWELL, 30, 448, 32, 145, 19.2),
    Gpu("RTX 5060 Ti-8GB", 7.5, 47, BLACKWELL, 36, 448, 32, 180, 23.7),
    Gpu("RTX 5060 Ti-16GB", 15.44, 47, BLACKWELL, 36, 448, 32, 180, 23.7),
    Gpu("RTX 5070", 11.5, 62, BLACKWELL, 48, 672, 48, 250, 30.9),
    Gpu("RTX 5070 Ti", 15.46, 88, BLACKWELL, 70, 896, 48, 300, 43.9),
    Gpu("RTX 5080", 15.46, 113, BLACKWELL, 84, 960, 64, 360, 56.3),
    # Workstations and servers
    Gpu("Quadro RTX 6000", 23.64, 130, TURING, 72, 672, 6, 260, 16.3),
    Gpu("Quadro RTX 8000", 47.4, 130, TURING, 72, 672, 6, 260, 16.3),
    Gpu("A2", 14.5, 18, AMPERE, 10, 200, 2, 60, 4.5),
    Gpu("A30", 23.5, 165, (8, 0), 56, 933, 24, 165, 10.3),
    Gpu("A40", 44.35, 150, AMPERE, 84, 696, 6, 300, 37.4),
    Gpu("A4000", 15.6, 77, AMPERE, 48, 448, 4, 140, 19.2),
    Gpu("A4500", 19.6, 95, AMPERE, 56, 640, 6, 200, 23.7),
    Gpu("A5000", 23.57, 111, AMPERE, 64, 768, 6, 230, 27.8),
    Gpu("A5500", 23.6, 136, AMPERE, 80, 768, 6, 230, 34.1),
    Gpu("A800", 79.15, 312, (8, 0), 108, 2039, 40, 400, 19.5, 200),
    Gpu("A800 PCIe", 79.15, 312, (8, 0), 108, 1935, 40, 300, 19.5),
    Gpu("RTX 4000 Ada", 19.5, 107, ADA, 48, 360, 48, 130, 26.7),
    Gpu("RTX 4500 Ada", 23.5, 159, ADA, 60, 432, 48, 210, 39.6),
    Gpu("RTX 5000 Ada", 31.4, 261, ADA, 100, 576, 64, 250, 65.3),
    Gpu("RTX 6000 Ada", 47.36, 364, ADA, 142, 960, 96, 300, 91.1),
    Gpu("RTX PRO 6000", 94.96, 504, BLACKWELL, 188, 1597, 128, 600, 120),
    Gpu("L20", 44.4, 120, ADA, 92, 864, 96, 275, 59.8),
    Gpu("L40", 44.4, 181, ADA, 142, 864, 96, 300, 90.5),
    Gpu("H20", 95.0, 148, HOPPER, 78, 4000, 60, 400, 44, 450),
    Gpu("H800", 79.1, 989, HOPPER, 132, 3350, 50, 700, 67, 200),
    Gpu("H800 PCIe", 79.1, 756, HOPPER, 114, 2000, 50, 350, 51),
    Gpu("H100 NVL", 93.08, 835, HOPPER, 132, 3938, 50, 400, 60, 300),
    Gpu("GH200", 94.5, 989, HOPPER, 132, 4000, 50, 700, 67, 450),
]  # fmt: skip

# What the driver calls them, where that is not NVIDIA and the name here
_DEVICE_NAMES = {
    "T4": "Tesla T4", "P100": "Tesla P100-PCIE-16GB",
    "V100-16GB": "Tesla V100-SXM2-16GB", "V100-32GB": "Tesla V100-SXM2-32GB",
    "V100-PCIe-16GB": "Tesla V100-PCIE-16GB", "V100-PCIe-32GB": "Tesla V100-PCIE-32GB",
    "A100-40GB": "NVIDIA A100-SXM4-40GB", "A100-80GB": "NVIDIA A100-SXM4-80GB", "A800": "NVIDIA A800-SXM4-80GB",
    "A100-PCIe-40GB": "NVIDIA A100-PCIE-40GB", "A100-PCIe-80GB": "NVIDIA A100 80GB PCIe",
    "A800 PCIe": "NVIDIA A800 80GB PCIe",
    "H100": "NVIDIA H100 80GB HBM3", "GH200": "NVIDIA GH200 480GB", "Titan RTX": "NVIDIA TITAN RTX",
    "Quadro RTX 6000": "Quadro RTX 6000", "Quadro RTX 8000": "Quadro RTX 8000",
    **{name: f"NVIDIA RTX {name}" for name in ("A4000", "A4500", "A5000", "A5500", "A6000")},
    **{f"RTX {n} Ada": f"NVIDIA RTX {n} Ada Generation" for n in (4000, 4500, 5000, 6000)},
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}  # fmt: skip
_SIZE = re.compile(r"\b(\d+)\s*gi?b?\b")
_BARE_SIZE = re.compile(r"(.*[\s_-])(\d{1,3})")  # as in A100-40
_OF_OTHERS = {
    "AMD": r"amd|radeon|instinct|mi\d{2,3}[ax]?|(rx|w)\s?\d{4}\w*|gfx\d+\w*",
    "Apple": r"apple|m[1-9](\s?(pro|max|ultra))?|mps",
    "Intel": r"intel|arc|gaudi\s?\d?",
    "Google": r"tpu([\s-]?v\d\w*)?",
}


def find_gpus(name: str) -> list[Gpu]:
    """Return the GPUs that a name as people write it, such as ``4090`` or ``h100 80gb``, stands for: A100 is two.

    Raises:
        ConfigError: If there is none. The message names the closest, or whose card it is if it is not NVIDIA's.
    """
    typed = name.lower().strip()
    if named := [gpu for gpu in GPUS if gpu.device_name.lower() == typed]:  # as nvidia-smi prints it
        return named
    sold_as = _SIZE.search(typed)  # GB, of which CUDA reports up to a tenth less
    size = float(sold_as[1]) if sold_as else None
    model = _model_of(typed)
    same_model = [gpu for gpu in GPUS if _model_of(gpu.name) == model]
    for variant in ("hbm2e", "pcie"):  # of most models there is one alone
        if not same_model and variant in model:
            model = model.replace(variant, "")
            same_model = [gpu for gpu in GPUS if _model_of(gpu.name) == model]
    if not same_model and size is None and (bare := _BARE_SIZE.fullmatch(typed)):
        size, model = float(bare[2]), _model_of(bare[1])
        same_model = [gpu for gpu in GPUS if _model_of(gpu.name) == model]
    if matching := [gpu for gpu in same_model if size is None or 0.9 * size <= gpu.memory_gib <= size]:
        return matching
    if not same_model:
        _check_that_it_is_nvidias(name)
    close = difflib.get_close_matches(model, [_model_of(gpu.name) for gpu in GPUS], n=3)
    candidates = same_model or [gpu for gpu in GPUS if _model_of(gpu.name) in close] or GPUS
    kind = "known" if candidates is GPUS else "the closest"
    names = ", ".join(gpu.name for gpu in candidates)
    raise ConfigError(f"--gpu {name!r} is unknown; {kind}: {names}; or give its memory, such as --memory 24GiB")


def gpu_memory(text: str) -> int:
    """Return the bytes that ``--memory`` stands for.

    Raises:
        ConfigError: If it is no amount of memory.
    """
    with contextlib.suppress(ConfigError):
        if num_bytes := MemoryAmount.parse("--memory", text).num_bytes:
            return num_bytes
    raise ConfigError(f"--memory {text} is not a memory size; write 24GiB, or 24")


def read_card(path: Path) -> Gpu:
    """Read the description of a GPU: a JSON object with the attributes of :class:`Gpu`.

    `name`, `memory_gib`, `peak_tflops` and `bandwidth` are needed; the rest is as of an A100 where it is left out.

    Raises:
        ConfigError: If the file is no such object. The message names the key.
    """
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--card {path}: {error.strerror}; name another file") from None
    except ValueError as error:
        raise ConfigError(f"--card {path} is not JSON: {error}") from None
    known = {field.name: field for field in fields(Gpu)}
    needed = ("name", "memory_gib", "peak_tflops", "bandwidth")
    if not isinstance(given, dict) or (missing := [key for key in needed if key not in given]):
        lacks = "is not an object" if not isinstance(given, dict) else f"lacks {missing[0]!r}"
        raise ConfigError(f"--card {path} {lacks}; it needs {', '.join(needed)}")
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"--card {path}: there is no {key!r}; it takes {', '.join(known)}")
        is_pair = key == "capability" and isinstance(value, list) and [type(part) for part in value] == [int, int]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, str) if key == "name" else is_pair if key == "capability" else is_number):
            wanted = {"name": "a text", "capability": "two whole numbers, such as [9, 0]"}.get(key, "a number above 0")
            raise ConfigError(f"--card {path}: {key} is {value!r} and must be {wanted}")
    return Gpu(**{**given, "capability": tuple(given.get("capability", (8, 0)))})


def _model_of(text: str) -> str:
    vendor = "nvidia|geforce|tesla|quadro|rtx|sxm\\d?|hbm3e?|hbm2(?!e)|generation|blackwell|workstation|server|edition"
    rest = re.sub(f"{_SIZE.pattern}|{vendor}", "", text.lower())
    return re.sub("[^a-z0-9]", "", rest)


def _check_that_it_is_nvidias(name: str) -> None:
    for vendor, pattern in _OF_OTHERS.items():
        if re.search(rf"\b({pattern})\b", name.lower()):
            raise ConfigError(
                f"--gpu {name!r} is {vendor}'s, and only NVIDIA's cards are emulated; to try a card of its size, give "
                "its memory, such as --memory 24GiB"
            )
