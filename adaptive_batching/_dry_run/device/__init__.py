"""A CUDA device that has memory and no processors, on which a CUDA build of torch runs where there is no GPU.

torch's caching allocator, its out-of-memory errors, streams, FSDP2 over NCCL, Inductor and Triton are the real ones.
What a GPU computes is missing: kernels and matrix products are counted and return at once. A library of C++ (`source/`)
stands in front of CUDA's runtime and driver, cuBLAS and NCCL. It is compiled here for an installed torch, with a C++
compiler and nothing of CUDA's, and programs are started on it; `control` is for these: counters, neighbours and faults.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptive_batching._values import AdaptiveBatchingError, ConfigError

SOURCE = Path(__file__).parent / "source"
OLDEST_TORCH = (2, 11)
# Whose calls the device answers, in site-packages
CALLERS = ("torch/lib/*.so", "bitsandbytes/libbitsandbytes_cuda*.so")
# Libraries whose functions the device has in their place, whoever calls them: the real ones would fail on its handles
REPLACED = tuple(f"nvidia/*/lib/lib{name}.so*" for name in ("cudart", "cublas", "cublasLt", "nccl"))
CALLS = re.compile(r"\b(cuda[A-Z]|__cuda|cublas|cusolver|cusparse|cufft|nccl|cu[A-Z])\w*")
PRODUCTS = re.compile(r"cublas\w*([gG]em[mv]|trsm|getrfBatched|[dD]ot)\w*")
# What Triton's launcher links to, and torch does not call
TRITON = (
    *("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuLaunchCooperativeKernel", "cuOccupancyMaxActiveClusters"),
    *("cuStreamGetCtx", "cuMemAllocHost_v2", "cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkComplete", "cuLinkDestroy"),
    *("cuMemcpyDtoHAsync_v2", "cuCtxGetLimit", "cuCtxSetLimit"),
)
# Functions that write a number for the host, and its place among their parameters; cuSOLVER's X write two of them. They
# become zero: the size of a workspace, or what says that all went well.
WRITTEN = {
    **{f"{name}_bufferSize": 6 for name in ("getrf", "geqrf", "potrf")}, "sytrf_bufferSize": 5, "gesvd_bufferSize": 4,
    **{f"{name}_bufferSize": 8 for name in ("orgqr", "ungqr", "syevd", "heevd", "syevjBatched", "heevjBatched")},
    **{f"{name}_bufferSize": 12 for name in ("ormqr", "unmqr", "gesvdjBatched", "Xsyevd", "XsyevBatched", "Xsytrs")},
    "gesvdj_bufferSize": 13, "gesvdaStridedBatched_bufferSize": 17, "Xgeqrf_bufferSize": 11, "Xpotrf_bufferSize": 9,
    "Xgeev_bufferSize": 18, "getrsBatched": 10, "geqrfBatched": 7, "gelsBatched": 10,
}  # fmt: skip
SOLVERS = re.compile(r"(?:cusolverDn|cublas)[SDCZ]?(\w+)")
DRIVER = re.compile(rb"(?<=\0)cu[A-Z][A-Za-z0-9_]+(?=\0)")  # functions of the driver among the strings of a library
NOT_SUPPORTED = {"cublas": 15, "cusparse": 10, "nccl": 5}  # of CUDA itself 801
GIB = 2**30
MOST_DEVICES = 16  # as in source/device.h


class BuildError(AdaptiveBatchingError, RuntimeError):
    """The device cannot be built here; says what is missing."""


@dataclass(frozen=True)
class EmulatedDevice:
    """A card, as far as memory goes."""

    memory_bytes: int = 80 * GIB
    """Of the card in all, as CUDA reports it."""
    count: int = 1
    """Cards, 1 to 16."""
    capability: tuple[int, int] = (8, 0)
    """Compute capability. With 9.0 torch would take cuDNN's attention, which plans its kernels on the card; flash
    attention is taken instead. It keeps as much for the backward pass; the workspace of cuDNN's backward is missing."""
    context_bytes: int = 500 * 2**20
    """Memory of the card that CUDA itself takes for a process."""
    lag: int | None = 0
    """Launches after which an event has happened: 0 at once, None only when the host waits for it. Memory that another
    stream still uses is held for as long: 0 gives the least that a card can reserve, None the most."""
    largest_copy_bytes: int = 2**20
    """Larger copies to the device are left out, so that a model larger than the host's memory loads; device memory that
    nothing was copied to reads as zeros."""
    processors: int = 108
    """Multiprocessors, which some kernels take workspaces for."""
    machine: Path | None = None
    """A folder for what processes share: they then share the memory of the cards, as on a real machine. None: each
    process has all cards to itself."""
    name: str = "emulated device"
    """As `nvidia-smi` and `torch.cuda.get_device_name` tell it."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_DEVICES:
            raise ConfigError(f"count={self.count}: an emulated machine has 1 to {MOST_DEVICES} devices; set another")

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a program on the device, what is inherited included; BuildError as from `build`."""
        library = build()
        major, minor = self.capability
        settings = {
            "MEMORY": self.memory_bytes, "COUNT": self.count, "CAPABILITY": 10 * major + minor,
            "CONTEXT": self.context_bytes, "LAG": -1 if self.lag is None else self.lag,
            "LARGEST_COPY": self.largest_copy_bytes, "PROCESSORS": self.processors,
            "MACHINE": self.machine or "", "NAME": self.name, "CUDA": f"{_torch()[1]}.0",
        }  # fmt: skip
        preloaded = [library, library.parent / "libnvidia-ml.so.1"]
        first = {"PYTHONPATH": str(Path(__file__).parent / "site")}
        if re.search(r"\s", str(library.parent)):  # LD_PRELOAD ends a path at a blank: names are looked for in folders
            first["LD_LIBRARY_PATH"] = str(library.parent)
            preloaded = [Path(path.name) for path in preloaded]
        first["LD_PRELOAD"] = ":".join(map(str, preloaded))
        joined = {name: f"{value}:{inherited[name]}" if inherited.get(name) else value for name, value in first.items()}
        own = {f"EMULATED_DEVICE_{name}": str(value) for name, value in settings.items()}
        return {
            **inherited, **own, **joined, "TRITON_LIBCUDA_PATH": str(library.parent),
            "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),  # not for real runs to find
        }  # fmt: skip


def write_nvidia_smi(folder: Path) -> None:
    """Write an `nvidia-smi` that answers for the cards of its environment, to a folder that is made."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    answers = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("nvidia_smi.py"))])
    program.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {answers} "$@"\n')
    program.chmod(0o755)


def parse_capability(text: str) -> tuple[int, int]:
    """Return a compute capability such as ``8.9``; ConfigError if it is none."""
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise ConfigError(f"--capability {text} is not a compute capability; write one such as 8.9")
    return int(match[1]), int(match[2])


def build() -> Path:
    """Return the library, `libcuda.so.1`, for the torch that is installed; compiled at the first call.

    It is kept in `$XDG_CACHE_HOME/adaptive_batching` (`~/.cache`), in a folder of its own for each version of torch and
    of this source. BuildError on another system, if torch is no CUDA build, or if there is no C++ compiler.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError("the emulated device runs on Linux on x86-64 alone")
    site, cuda = _torch()
    compiler = os.environ.get("CXX", "g++")
    sources = [Path(__file__), *sorted(SOURCE.glob("*.*"))]
    callers, replaced = (sorted(p for pattern in of for p in site.glob(pattern)) for of in (CALLERS, REPLACED))
    stamps = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in (*callers, *replaced)]
    text = "".join([cuda, compiler, *stamps, *(path.read_text() for path in sources)])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "adaptive_batching" / "emulated_device"
    if set(";:") & set(str(cache)):
        raise BuildError(f"the loader would split {cache} at ':' and ';'; set XDG_CACHE_HOME to another folder")
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if library.exists():
        return library
    if not shutil.which(compiler):
        needed = f"the emulated device needs a C++ compiler, and {compiler!r} is not there"
        raise BuildError(f"{needed}; install g++, or set CXX")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        defined = set(filter(CALLS.fullmatch, _symbols(replaced, "--defined-only", "TWi")))
        _compile(compiler, Path(unfinished), _called(callers) | defined | set(TRITON), cuda)
        (Path(unfinished) / "libcuda.so").symlink_to("libcuda.so.1")  # the name that Triton's launcher is linked to
        try:
            Path(unfinished).rename(folder)
        except OSError:  # another process was first
            if not library.exists():
                raise
        else:
            Path(unfinished).mkdir()  # for the context to remove
    return library


def _torch() -> tuple[Path, str]:
    """Return the folder that torch is installed in, and its version of CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("the emulated device needs a CUDA build of torch, and no torch is installed")
    package = Path(spec.submodule_search_locations[0])
    text = (package / "version.py").read_text()
    version = re.search(r"^cuda\b.*= '(\d+)\.\d+'", text, re.MULTILINE)
    if version is None:
        needed = f"the emulated device needs a CUDA build of torch, and {package} is a CPU build"
        raise BuildError(f"{needed}; install one in another environment")
    release = re.search(r"^__version__ = '(\d+)\.(\d+)", text, re.MULTILINE)
    if release is not None and (int(release[1]), int(release[2])) < OLDEST_TORCH:
        oldest, installed = (".".join(map(str, numbers)) for numbers in (OLDEST_TORCH, release.groups()))
        raise BuildError(f"the emulated device needs torch {oldest} or later, and {package} is {installed}; update it")
    return package.parent, version[1]


def _compile(compiler: str, to: Path, wanted: set[str], cuda: str) -> None:
    options = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", f"-DCUDA_MAJOR={cuda}", f"-I{to}"]
    sources = {path.name: str(path) for path in sorted(SOURCE.glob("*.cpp"))}
    management = sources.pop("nvml.cpp")
    code = "".join(Path(path).read_text() for path in sources.values())
    answered = {match[0] for match in CALLS.finditer(code)}
    absent = sorted(name for name in wanted if not {name, f"{name}_v2"} & answered)
    (to / "absent.inc").write_text("".join(map(_answer, absent)))
    for name, of in (("libcuda.so.1", list(sources.values())), ("libnvidia-ml.so.1", [management])):
        link = ["-shared", f"-Wl,-soname,{name}", "-ldl", "-lrt", "-lpthread", "-o", str(to / name)]
        done = subprocess.run([compiler, *options, *of, *link], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{compiler} cannot compile the emulated device:\n{done.stderr}")


def _symbols(libraries: list[Path], which: str, kinds: str) -> list[str]:
    if not libraries:
        return []
    command = ["nm", "-D", which, *map(str, libraries)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split()[-2:] for line in lines if line.strip() and not line.endswith(":")]
    return [name.partition("@")[0] for kind, name in symbols if kind in kinds]


def _called(libraries: list[Path]) -> set[str]:
    """Return what the libraries call and do not have, of what the device answers: linked to, and looked up by name."""
    names = _symbols(libraries, "--undefined-only", "U")
    for path in libraries:
        if "c10" in path.name:
            names += [name.decode() for name in DRIVER.findall(path.read_bytes())]
    return set(filter(CALLS.fullmatch, names))


def _answer(name: str) -> str:
    """Return the line for a function that the device lacks: one that does nothing, or says that it is not supported."""
    solver = SOLVERS.fullmatch(name)
    if solver and solver[1] in WRITTEN:
        return f"WRITES_ZERO({name}, {WRITTEN[solver[1]]}, {'size_t, 2' if solver[1][0] == 'X' else 'int, 1'})\n"
    if PRODUCTS.fullmatch(name):
        return f"PRODUCT({name})\n"
    if name.startswith("cusolver"):
        return f"SOLVER({name})\n"
    code = next((code for prefix, code in NOT_SUPPORTED.items() if name.startswith(prefix)), 801)
    return f"ABSENT({name}, {code})\n"
