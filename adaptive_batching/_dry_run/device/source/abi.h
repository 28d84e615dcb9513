// What the device needs to know of the binary interfaces of CUDA 12.6 to 13.0, cuBLAS and NCCL, written from their public
// documentation, so that it compiles where none of their headers are. tests/emulated/test_abi.py holds sizes, offsets and
// values against NVIDIA's own headers.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef CUDA_MAJOR
#define CUDA_MAJOR 13
#endif

namespace abi {

// cudaError_t and CUresult use the same numbers for all of these.
enum Error : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILURE = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
};
enum BlasStatus : int { BLAS_SUCCESS = 0, BLAS_NOT_SUPPORTED = 15 };
enum NcclResult : int { NCCL_SUCCESS = 0, NCCL_UNHANDLED_CUDA_ERROR = 1, NCCL_INVALID_USAGE = 5 };

// cudaDeviceAttr and CUdevice_attribute
enum Attribute : int {
  MAX_THREADS_PER_BLOCK = 1,
  MAX_BLOCK_DIM_X = 2,
  MAX_BLOCK_DIM_Y = 3,
  MAX_BLOCK_DIM_Z = 4,
  MAX_GRID_DIM_X = 5,
  MAX_GRID_DIM_Y = 6,
  MAX_GRID_DIM_Z = 7,
  MAX_SHARED_MEMORY_PER_BLOCK = 8,
  WARP_SIZE = 10,
  MAX_REGISTERS_PER_BLOCK = 12,
  TEXTURE_ALIGNMENT = 14,
  MULTIPROCESSOR_COUNT = 16,
  CAN_MAP_HOST_MEMORY = 19,
  CONCURRENT_KERNELS = 31,
  L2_CACHE_SIZE = 38,
  MAX_THREADS_PER_MULTIPROCESSOR = 39,
  ASYNC_ENGINE_COUNT = 40,
  UNIFIED_ADDRESSING = 41,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  MANAGED_MEMORY = 83,
  CONCURRENT_MANAGED_ACCESS = 89,
  COOPERATIVE_LAUNCH = 95,
  MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  VIRTUAL_MEMORY_MANAGEMENT = 102,
  MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
  RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
  MEMORY_POOLS = 115,
};

enum MemoryType : int { UNREGISTERED = 0, HOST = 1, DEVICE = 2, MANAGED = 3 };
enum LocationType : int { LOCATION_DEVICE = 1 };
enum PointerAttribute : int { DEVICE_POINTER = 3, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
enum FunctionAttribute : int { FUNCTION_MAX_THREADS = 0, FUNCTION_REGISTERS = 4, FUNCTION_SHARED = 8 };

struct Dim3 { unsigned x, y, z; };

struct DeviceProperties {  // cudaDeviceProp
  char name[256];
  char uuid[16], luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_mem, shared_mem_per_block;
  int regs_per_block, warp_size;
  size_t mem_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
#if CUDA_MAJOR < 13
  int clock_rate;
#endif
  size_t total_const_mem;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
#if CUDA_MAJOR < 13
  int device_overlap;
#endif
  int multi_processor_count;
#if CUDA_MAJOR < 13
  int kernel_exec_timeout_enabled;
#endif
  int integrated, can_map_host_memory;
#if CUDA_MAJOR < 13
  int compute_mode;
#endif
  int max_texture_1d, max_texture_1d_mipmap;
#if CUDA_MAJOR < 13
  int max_texture_1d_linear;
#endif
  int max_textures_and_surfaces[37];
  size_t surface_alignment;
  int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver, async_engine_count;
  int unified_addressing;
#if CUDA_MAJOR < 13
  int memory_clock_rate;
#endif
  int memory_bus_width, l2_cache_size, persisting_l2_cache_max_size, max_threads_per_multi_processor;
  int stream_priorities_supported, global_l1_cache_supported, local_l1_cache_supported;
  size_t shared_mem_per_multiprocessor;
  int regs_per_multiprocessor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id;
  int host_native_atomic_supported;
#if CUDA_MAJOR < 13
  int single_to_double_precision_perf_ratio;
#endif
  int pageable_memory_access, concurrent_managed_access, compute_preemption_supported;
  int can_use_host_pointer_for_registered_mem, cooperative_launch;
#if CUDA_MAJOR < 13
  int cooperative_multi_device_launch;
#endif
  size_t shared_mem_per_block_optin;
  int pageable_memory_access_uses_host_page_tables, direct_managed_mem_access_from_host;
  int max_blocks_per_multi_processor, access_policy_max_window_size;
  size_t reserved_shared_mem_per_block;
  int host_register_supported, sparse_cuda_array_supported, host_register_read_only_supported;
  int timeline_semaphore_interop_supported, memory_pools_supported;
  int rest[76];  // of no use here, and larger than the two versions' own ends: see DEVICE_PROPERTIES_BYTES
};
// What the caller's structure takes, so that nothing is written behind it
constexpr size_t DEVICE_PROPERTIES_BYTES = CUDA_MAJOR < 13 ? 1032 : 1008;

struct FunctionAttributes {  // cudaFuncAttributes
  size_t shared_size_bytes, const_size_bytes, local_size_bytes;
  int max_threads_per_block, num_regs, ptx_version, binary_version, cache_mode_ca, max_dynamic_shared_size_bytes;
  int preferred_shmem_carveout, cluster_dim_must_be_set, required_cluster[3], cluster_scheduling_policy;
  int non_portable_cluster_size_allowed, reserved[16];
};
struct PointerAttributes {  // cudaPointerAttributes
  int type, device;
  void *device_pointer, *host_pointer;
#if CUDA_MAJOR >= 13
  long reserved[8];
#endif
};
struct Location { int type, id; };  // cudaMemLocation and CUmemLocation
struct AllocationProperties {  // CUmemAllocationProp, as far as it is read
  int type, requested_handle_types;
  Location location;
};
struct BlasHeuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_size;
  int state;
  float waves_count;
  int reserved[4];
};
struct NcclId { char internal[128]; };
enum NcclType : int {
  NCCL_INT8 = 0, NCCL_UINT8 = 1, NCCL_INT32 = 2, NCCL_UINT32 = 3, NCCL_INT64 = 4, NCCL_UINT64 = 5, NCCL_FLOAT16 = 6,
  NCCL_FLOAT32 = 7, NCCL_FLOAT64 = 8, NCCL_BFLOAT16 = 9, NCCL_FLOAT8_E4M3 = 10, NCCL_FLOAT8_E5M2 = 11,
};
enum NcclReduction : int { NCCL_SUM = 0, NCCL_PROD = 1, NCCL_MAX = 2, NCCL_MIN = 3, NCCL_AVG = 4, NCCL_FIRST_CUSTOM = 5 };

}  // namespace abi
