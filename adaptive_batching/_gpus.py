"""NVIDIA's cards, by the names that people type."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adaptive_batching._trace.allocator import GIB
from adaptive_batching._values import ConfigError


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
    """Dense bfloat16 products summed in float32, from NVIDIA's data sheets; float16 on GPUs without bfloat16."""

    capability: tuple[int, int] = (8, 0)
    processors: int = 108
    """Streaming multiprocessors."""

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


TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)
GPUS = [
    Gpu("T4", 14.56, 65, TURING, 40), Gpu("P100", 15.88, 19, (6, 0), 56), Gpu("V100-16GB", 15.77, 125, (7, 0), 80),
    Gpu("V100-32GB", 31.73, 125, (7, 0), 80), Gpu("A10", 21.99, 125, AMPERE, 72),
    Gpu("A10G", 21.99, 70, AMPERE, 80), Gpu("L4", 21.95, 121, ADA, 58),
    Gpu("RTX 3090", 23.56, 71, AMPERE, 82), Gpu("RTX 4090", 23.52, 165, ADA, 128),
    Gpu("RTX 5090", 31.35, 210, BLACKWELL, 170), Gpu("A6000", 47.4, 155, AMPERE, 84),
    Gpu("L40S", 44.4, 362, ADA, 142), Gpu("A100-40GB", 39.39, 312, (8, 0), 108),
    Gpu("A100-80GB", 79.15, 312, (8, 0), 108), Gpu("H100", 79.1, 989, HOPPER, 132),
    Gpu("H200", 139.8, 989, HOPPER, 132), Gpu("B200", 178.35, 2250, (10, 0), 148),
    # GeForce: half the rate of the chip where sums are in float32
    Gpu("RTX 2060", 5.61, 26, TURING, 30), Gpu("RTX 2070", 7.6, 30, TURING, 36),
    Gpu("RTX 2070 Super", 7.6, 36, TURING, 40), Gpu("RTX 2080", 7.6, 40, TURING, 46),
    Gpu("RTX 2080 Super", 7.6, 45, TURING, 48), Gpu("RTX 2080 Ti", 10.57, 54, TURING, 68),
    Gpu("Titan RTX", 23.64, 130, TURING, 72), Gpu("RTX 3060", 11.63, 26, AMPERE, 28),
    Gpu("RTX 3060 Ti", 7.66, 32, AMPERE, 38), Gpu("RTX 3070", 7.66, 41, AMPERE, 46),
    Gpu("RTX 3070 Ti", 7.66, 43, AMPERE, 48), Gpu("RTX 3080-10GB", 9.64, 60, AMPERE, 68),
    Gpu("RTX 3080-12GB", 11.63, 61, AMPERE, 70), Gpu("RTX 3080 Ti", 11.63, 68, AMPERE, 80),
    Gpu("RTX 3090 Ti", 23.55, 80, AMPERE, 84), Gpu("RTX 4060", 7.63, 30, ADA, 24),
    Gpu("RTX 4060 Ti-8GB", 7.62, 44, ADA, 34), Gpu("RTX 4060 Ti-16GB", 15.57, 44, ADA, 34),
    Gpu("RTX 4070", 11.59, 58, ADA, 46), Gpu("RTX 4070 Super", 11.59, 71, ADA, 56),
    Gpu("RTX 4070 Ti", 11.59, 80, ADA, 60), Gpu("RTX 4070 Ti Super", 15.57, 88, ADA, 66),
    Gpu("RTX 4080", 15.57, 97, ADA, 76), Gpu("RTX 4080 Super", 15.57, 104, ADA, 80),
    Gpu("RTX 5060", 7.5, 38, BLACKWELL, 30), Gpu("RTX 5060 Ti-8GB", 7.5, 47, BLACKWELL, 36),
    Gpu("RTX 5060 Ti-16GB", 15.44, 47, BLACKWELL, 36), Gpu("RTX 5070", 11.5, 62, BLACKWELL, 48),
    Gpu("RTX 5070 Ti", 15.46, 88, BLACKWELL, 70), Gpu("RTX 5080", 15.46, 113, BLACKWELL, 84),
    # Workstations and servers
    Gpu("Quadro RTX 6000", 23.64, 130, TURING, 72), Gpu("Quadro RTX 8000", 47.4, 130, TURING, 72),
    Gpu("A2", 14.5, 18, AMPERE, 10), Gpu("A30", 23.5, 165, (8, 0), 56), Gpu("A40", 44.35, 150, AMPERE, 84),
    Gpu("A4000", 15.6, 77, AMPERE, 48), Gpu("A4500", 19.6, 95, AMPERE, 56), Gpu("A5000", 23.57, 111, AMPERE, 64),
    Gpu("A5500", 23.6, 136, AMPERE, 80), Gpu("A800", 79.15, 312, (8, 0), 108),
    Gpu("RTX 4000 Ada", 19.5, 107, ADA, 48), Gpu("RTX 4500 Ada", 23.5, 159, ADA, 60),
    Gpu("RTX 5000 Ada", 31.4, 261, ADA, 100), Gpu("RTX 6000 Ada", 47.36, 364, ADA, 142),
    Gpu("RTX PRO 6000", 94.96, 504, BLACKWELL, 188), Gpu("L20", 44.4, 120, ADA, 92), Gpu("L40", 44.4, 181, ADA, 142),
    Gpu("H20", 95.0, 148, HOPPER, 78), Gpu("H800", 79.1, 989, HOPPER, 132), Gpu("H100 NVL", 93.08, 835, HOPPER, 132),
    Gpu("GH200", 94.5, 989, HOPPER, 132),
]  # fmt: skip

# What the driver calls them, where that is not NVIDIA and the name here
_DEVICE_NAMES = {
    "T4": "Tesla T4", "P100": "Tesla P100-PCIE-16GB",
    "V100-16GB": "Tesla V100-SXM2-16GB", "V100-32GB": "Tesla V100-SXM2-32GB",
    "A100-40GB": "NVIDIA A100-SXM4-40GB", "A100-80GB": "NVIDIA A100-SXM4-80GB", "A800": "NVIDIA A800-SXM4-80GB",
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


def _model_of(text: str) -> str:
    vendor = "nvidia|geforce|tesla|quadro|rtx|pcie|sxm\\d?|hbm\\d?e?|generation|blackwell|workstation|server|edition"
    rest = re.sub(f"{_SIZE.pattern}|{vendor}", "", text.lower())
    return re.sub("[^a-z0-9]", "", rest)


def _check_that_it_is_nvidias(name: str) -> None:
    for vendor, pattern in _OF_OTHERS.items():
        if re.search(rf"\b({pattern})\b", name.lower()):
            raise ConfigError(
                f"--gpu {name!r} is {vendor}'s, and only NVIDIA's cards are emulated; to try a card of its size, give "
                "its memory, such as --memory 24GiB"
            )
