"""The device's own declarations, held against NVIDIA's headers, of CUDA 12.6 and 13.0."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from adaptive_batching._emulated_device import SOURCE

PACKAGES = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
# Headers of NCCL and of compilers, which are installed for one version, and go with both
COMMON = [PACKAGES / "cu13/include/cccl", PACKAGES / "cu13/include", PACKAGES / "nccl/include"]
HEADERS = {12: [PACKAGES / "cuda_runtime/include"], 13: []}

STRUCTURES = {
    "DeviceProperties": (
        "cudaDeviceProp",
        {
            "name": "name", "uuid": "uuid", "total_global_mem": "totalGlobalMem",
            "shared_mem_per_block": "sharedMemPerBlock",
            "mem_pitch": "memPitch", "max_threads_per_block": "maxThreadsPerBlock", "max_grid_size": "maxGridSize",
            "total_const_mem": "totalConstMem", "major": "major", "minor": "minor",
            "texture_alignment": "textureAlignment",
            "multi_processor_count": "multiProcessorCount", "can_map_host_memory": "canMapHostMemory",
            "surface_alignment": "surfaceAlignment", "concurrent_kernels": "concurrentKernels",
            "pci_bus_id": "pciBusID",
            "async_engine_count": "asyncEngineCount", "unified_addressing": "unifiedAddressing",
            "memory_bus_width": "memoryBusWidth", "l2_cache_size": "l2CacheSize",
            "max_threads_per_multi_processor": "maxThreadsPerMultiProcessor",
            "shared_mem_per_multiprocessor": "sharedMemPerMultiprocessor", "managed_memory": "managedMemory",
            "concurrent_managed_access": "concurrentManagedAccess", "cooperative_launch": "cooperativeLaunch",
            "shared_mem_per_block_optin": "sharedMemPerBlockOptin",
            "max_blocks_per_multi_processor": "maxBlocksPerMultiProcessor",
            "reserved_shared_mem_per_block": "reservedSharedMemPerBlock",
            "memory_pools_supported": "memoryPoolsSupported",
        },
    ),
    "FunctionAttributes": (
        "cudaFuncAttributes",
        {
            "max_threads_per_block": "maxThreadsPerBlock", "num_regs": "numRegs", "ptx_version": "ptxVersion",
            "binary_version": "binaryVersion", "max_dynamic_shared_size_bytes": "maxDynamicSharedSizeBytes",
        },
    ),
    "PointerAttributes": (
        "cudaPointerAttributes",
        {"type": "type", "device": "device", "device_pointer": "devicePointer", "host_pointer": "hostPointer"},
    ),
    "Location": ("cudaMemLocation", {"type": "type", "id": "id"}),
    "BlasHeuristic": (
        "cublasLtMatmulHeuristicResult_t", {"workspace_size": "workspaceSize", "state": "state",
        "waves_count": "wavesCount"}
    ),
    "NcclId": ("ncclUniqueId", {"internal": "internal"}),
    "Dim3": ("dim3", {"x": "x", "y": "y", "z": "z"}),
}  # fmt: skip
OFFSETS_ALONE = {  # of which the beginning is declared
    "AllocationProperties": ("CUmemAllocationProp", {"type": "type", "location": "location"}),
}
VALUES = {
    "OUT_OF_MEMORY": "cudaErrorMemoryAllocation", "INVALID_VALUE": "cudaErrorInvalidValue",
    "NOT_READY": "cudaErrorNotReady",
    "INVALID_DEVICE": "cudaErrorInvalidDevice", "ILLEGAL_ADDRESS": "cudaErrorIllegalAddress",
    "LAUNCH_FAILURE": "cudaErrorLaunchFailure", "NOT_SUPPORTED": "cudaErrorNotSupported",
    "BLAS_NOT_SUPPORTED": "CUBLAS_STATUS_NOT_SUPPORTED", "NCCL_UNHANDLED_CUDA_ERROR": "ncclUnhandledCudaError",
    "NCCL_INVALID_USAGE": "ncclInvalidUsage", "MAX_THREADS_PER_BLOCK": "cudaDevAttrMaxThreadsPerBlock",
    "MAX_BLOCK_DIM_X": "cudaDevAttrMaxBlockDimX", "MAX_BLOCK_DIM_Z": "cudaDevAttrMaxBlockDimZ",
    "MAX_GRID_DIM_X": "cudaDevAttrMaxGridDimX", "MAX_SHARED_MEMORY_PER_BLOCK": "cudaDevAttrMaxSharedMemoryPerBlock",
    "WARP_SIZE": "cudaDevAttrWarpSize", "MAX_REGISTERS_PER_BLOCK": "cudaDevAttrMaxRegistersPerBlock",
    "TEXTURE_ALIGNMENT": "cudaDevAttrTextureAlignment", "MULTIPROCESSOR_COUNT": "cudaDevAttrMultiProcessorCount",
    "CAN_MAP_HOST_MEMORY": "cudaDevAttrCanMapHostMemory", "CONCURRENT_KERNELS": "cudaDevAttrConcurrentKernels",
    "L2_CACHE_SIZE": "cudaDevAttrL2CacheSize",
    "MAX_THREADS_PER_MULTIPROCESSOR": "cudaDevAttrMaxThreadsPerMultiProcessor",
    "ASYNC_ENGINE_COUNT": "cudaDevAttrAsyncEngineCount", "UNIFIED_ADDRESSING": "cudaDevAttrUnifiedAddressing",
    "CAPABILITY_MAJOR": "cudaDevAttrComputeCapabilityMajor", "CAPABILITY_MINOR": "cudaDevAttrComputeCapabilityMinor",
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": "cudaDevAttrMaxSharedMemoryPerMultiprocessor",
    "MAX_REGISTERS_PER_MULTIPROCESSOR": "cudaDevAttrMaxRegistersPerMultiprocessor",
    "MANAGED_MEMORY": "cudaDevAttrManagedMemory", "CONCURRENT_MANAGED_ACCESS": "cudaDevAttrConcurrentManagedAccess",
    "COOPERATIVE_LAUNCH": "cudaDevAttrCooperativeLaunch",
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": "cudaDevAttrMaxSharedMemoryPerBlockOptin",
    "VIRTUAL_MEMORY_MANAGEMENT": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "MAX_BLOCKS_PER_MULTIPROCESSOR": "cudaDevAttrMaxBlocksPerMultiprocessor",
    "RESERVED_SHARED_MEMORY_PER_BLOCK": "cudaDevAttrReservedSharedMemoryPerBlock",
    "MEMORY_POOLS": "cudaDevAttrMemoryPoolsSupported", "HOST": "cudaMemoryTypeHost", "DEVICE": "cudaMemoryTypeDevice",
    "MANAGED": "cudaMemoryTypeManaged", "LOCATION_DEVICE": "cudaMemLocationTypeDevice",
    "DEVICE_POINTER": "CU_POINTER_ATTRIBUTE_DEVICE_POINTER", "DEVICE_ORDINAL": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "RANGE_START": "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR", "RANGE_SIZE": "CU_POINTER_ATTRIBUTE_RANGE_SIZE",
    "FUNCTION_MAX_THREADS": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
    "FUNCTION_REGISTERS": "CU_FUNC_ATTRIBUTE_NUM_REGS",
    "NCCL_INT8": "ncclInt8", "NCCL_UINT8": "ncclUint8", "NCCL_INT32": "ncclInt32", "NCCL_INT64": "ncclInt64",
    "NCCL_FLOAT16": "ncclFloat16", "NCCL_FLOAT32": "ncclFloat32", "NCCL_FLOAT64": "ncclFloat64",
    "NCCL_BFLOAT16": "ncclBfloat16", "NCCL_SUM": "ncclSum", "NCCL_PROD": "ncclProd", "NCCL_MAX": "ncclMax",
    "NCCL_MIN": "ncclMin", "NCCL_AVG": "ncclAvg", "NCCL_FIRST_CUSTOM": "ncclNumOps",
}  # fmt: skip


def assertions(cuda: int) -> str:
    lines = ["sizeof(cudaDeviceProp) == abi::DEVICE_PROPERTIES_BYTES"]
    left_out = {"BlasHeuristic", "BLAS_NOT_SUPPORTED"} if cuda == 12 else set()  # cuBLAS' headers are those of 13
    for ours, (theirs, fields) in {**STRUCTURES, **OFFSETS_ALONE}.items():
        if ours in left_out:
            continue
        if ours in STRUCTURES and ours != "DeviceProperties":
            lines.append(f"sizeof(abi::{ours}) == sizeof({theirs})")
        lines += [f"offsetof(abi::{ours}, {own}) == offsetof({theirs}, {name})" for own, name in fields.items()]
    lines += [f"int(abi::{ours}) == int({theirs})" for ours, theirs in VALUES.items() if ours not in left_out]
    return "".join(f'static_assert({line}, "");\n' for line in lines)


@pytest.mark.parametrize("cuda", [12, 13])
def test_declarations_are_those_of_nvidias_headers(cuda: int, tmp_path: Path) -> None:
    headers = ["cuda.h", "cuda_runtime_api.h", "nccl.h", *(["cublasLt.h"] if cuda == 13 else [])]
    includes = "".join(f"#include <{name}>\n" for name in headers)
    source = tmp_path / "check.cpp"
    source.write_text(f'{includes}#include <cstddef>\n#include "abi.h"\n{assertions(cuda)}')
    folders = [f"-I{folder}" for folder in (*HEADERS[cuda], SOURCE, *COMMON)]
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-DCUDA_MAJOR={cuda}", *folders, str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000]
