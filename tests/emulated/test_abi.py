"""The device's own declarations, held against NVIDIA's headers, of CUDA 12.6 and 13.0."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from adaptive_batching._dry_run.device import SOURCE, WRITTEN

PACKAGES = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
# Headers of NCCL and of compilers, which are installed for one version, and go with both
COMMON = [PACKAGES / "cu13/include/cccl", PACKAGES / "cu13/include", PACKAGES / "nccl/include"]
HEADERS = {12: [PACKAGES / "cuda_runtime/include"], 13: []}
# (our structure, theirs) -> our fields; theirs are the same in camel case
STRUCTURES = {
    ("DeviceProperties", "cudaDeviceProp"): (
        "name uuid total_global_mem shared_mem_per_block mem_pitch max_threads_per_block max_grid_size "
        "total_const_mem major minor texture_alignment multi_processor_count can_map_host_memory "
        "surface_alignment concurrent_kernels pci_bus_id async_engine_count unified_addressing "
        "memory_bus_width l2_cache_size max_threads_per_multi_processor shared_mem_per_multiprocessor "
        "managed_memory concurrent_managed_access cooperative_launch shared_mem_per_block_optin "
        "max_blocks_per_multi_processor reserved_shared_mem_per_block memory_pools_supported"
    ),
    ("FunctionAttributes", "cudaFuncAttributes"): (
        "max_threads_per_block num_regs ptx_version binary_version max_dynamic_shared_size_bytes"
    ),
    ("PointerAttributes", "cudaPointerAttributes"): "type device device_pointer host_pointer",
    ("Location", "cudaMemLocation"): "type id",
    ("BlasHeuristic", "cublasLtMatmulHeuristicResult_t"): "workspace_size state waves_count",
    ("NcclId", "ncclUniqueId"): "internal",
    ("Dim3", "dim3"): "x y z",
    # of which the beginning is declared
    ("AllocationProperties", "CUmemAllocationProp"): "type location",
}
# Our constants, and theirs: the same in camel case after a prefix, or others
ALIKE = {
    "cudaError": "INVALID_VALUE NOT_READY NO_DEVICE INVALID_DEVICE ILLEGAL_ADDRESS LAUNCH_FAILURE NOT_SUPPORTED",
    "nccl": (
        "UNHANDLED_CUDA_ERROR INVALID_USAGE INT8 UINT8 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 SUM PROD MAX "
        "MIN AVG"
    ),
    "cudaDevAttr": (
        "MAX_THREADS_PER_BLOCK MAX_BLOCK_DIM_X MAX_BLOCK_DIM_Z MAX_GRID_DIM_X MAX_SHARED_MEMORY_PER_BLOCK "
        "WARP_SIZE MAX_REGISTERS_PER_BLOCK TEXTURE_ALIGNMENT CAN_MAP_HOST_MEMORY CONCURRENT_KERNELS L2_CACHE_SIZE "
        "ASYNC_ENGINE_COUNT UNIFIED_ADDRESSING MAX_SHARED_MEMORY_PER_MULTIPROCESSOR "
        "MAX_REGISTERS_PER_MULTIPROCESSOR MANAGED_MEMORY CONCURRENT_MANAGED_ACCESS COOPERATIVE_LAUNCH "
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN MAX_BLOCKS_PER_MULTIPROCESSOR RESERVED_SHARED_MEMORY_PER_BLOCK"
    ),
}
OTHERS = {
    "OUT_OF_MEMORY": "cudaErrorMemoryAllocation", "BLAS_NOT_SUPPORTED": "CUBLAS_STATUS_NOT_SUPPORTED",
    "MULTIPROCESSOR_COUNT": "cudaDevAttrMultiProcessorCount",
    "MAX_THREADS_PER_MULTIPROCESSOR": "cudaDevAttrMaxThreadsPerMultiProcessor",
    "CAPABILITY_MAJOR": "cudaDevAttrComputeCapabilityMajor", "CAPABILITY_MINOR": "cudaDevAttrComputeCapabilityMinor",
    "VIRTUAL_MEMORY_MANAGEMENT": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "MEMORY_POOLS": "cudaDevAttrMemoryPoolsSupported", "HOST": "cudaMemoryTypeHost", "DEVICE": "cudaMemoryTypeDevice",
    "MANAGED": "cudaMemoryTypeManaged", "LOCATION_DEVICE": "cudaMemLocationTypeDevice",
    "DEVICE_POINTER": "CU_POINTER_ATTRIBUTE_DEVICE_POINTER", "DEVICE_ORDINAL": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "RANGE_START": "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR", "RANGE_SIZE": "CU_POINTER_ATTRIBUTE_RANGE_SIZE",
    "FUNCTION_MAX_THREADS": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
    "FUNCTION_SHARED": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "FUNCTION_REGISTERS": "CU_FUNC_ATTRIBUTE_NUM_REGS", "NCCL_FIRST_CUSTOM": "ncclNumOps",
}  # fmt: skip


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def assertions(cuda: int) -> str:
    lines = ["sizeof(cudaDeviceProp) == abi::DEVICE_PROPERTIES_BYTES"]
    left_out = {"BlasHeuristic", "BLAS_NOT_SUPPORTED"} if cuda == 12 else set()  # cuBLAS' headers are those of 13
    for (ours, theirs), fields in STRUCTURES.items():
        if ours in left_out:
            continue
        if ours not in ("DeviceProperties", "AllocationProperties"):
            lines.append(f"sizeof(abi::{ours}) == sizeof({theirs})")
        for own in fields.split():
            name = "pciBusID" if own == "pci_bus_id" else own[0] + camel(own)[1:]
            lines.append(f"offsetof(abi::{ours}, {own}) == offsetof({theirs}, {name})")
    values = {name: prefix + camel(name) for prefix, names in ALIKE.items() for name in names.split()}
    for ours, theirs in {**values, **OTHERS}.items():
        if ours not in left_out:
            own = f"NCCL_{ours}" if theirs == f"nccl{camel(ours)}" else ours
            lines.append(f"int(abi::{own}) == int({theirs})")
    return "".join(f'static_assert({line}, "");\n' for line in lines)


@pytest.mark.parametrize("cuda", [12, 13])
def test_declarations_are_those_of_nvidias_headers(cuda: int, tmp_path: Path) -> None:
    headers = ["cuda.h", "cuda_runtime_api.h", "nccl.h", *(["cublasLt.h"] if cuda == 13 else [])]
    includes = "".join(f"#include <{name}>\n" for name in headers)
    source = tmp_path / "check.cpp"
    source.write_text(f'{includes}#include <cstddef>\n#include "abi.h"\n{assertions(cuda)}')
    folders = [f"-I{folder}" for folder in (*HEADERS[cuda], SOURCE, *COMMON)]
    flags = ["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-DCUDA_MAJOR={cuda}", *folders]
    done = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def test_numbers_are_written_where_nvidias_solvers_write_them() -> None:
    text = "".join((PACKAGES / f"cu13/include/{name}").read_text() for name in ("cusolverDn.h", "cublas_api.h"))
    declared = re.findall(r"(?:cusolverDn|cublas)[SDCZ]?(\w+)\s*\(([^)]*)\)", text)
    found = {name: parameters.split(",") for name, parameters in declared}
    for name, place in WRITTEN.items():
        wanted = r"size_t *\*\s*workspaceInBytesOnDevice" if name[0] == "X" else r"int *\*\s*(lwork|work_size|info)"
        assert re.search(wanted, found[name][place - 1], re.IGNORECASE), f"{name}: {found[name]}"


def test_sizes_of_sparse_products_are_written_where_cusparse_writes_them() -> None:
    declared = re.findall(r"(cusparse\w+)\s*\(([^)]*)\)", (PACKAGES / "cu13/include/cusparse.h").read_text())
    parameters = {name: given.split(",") for name, given in declared}
    written = re.findall(r"WRITES_ZERO\((cusparse\w+), (\d+), (\w+), (\d)\)", (SOURCE / "kernels.cpp").read_text())
    assert len(written) == 10
    for name, place, kind, times in written:
        numbers = parameters[name][int(place) - 1 : int(place) - 1 + int(times)]
        assert all(re.match(rf"\s*{kind}\*", each) for each in numbers), f"{name}: {numbers}"
