// Kernels and matrix products: counted, and not computed.
#include "device.h"
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

using namespace device;

// Of what torch's kernels are compiled for, the latest that runs on the card: cub looks for the code that it would run.
static int compiled_for() {
  int best = 75;
  for (int capability : {80, 86, 90, 100, 120}) if (capability <= settings().capability) best = capability;
  return best;
}

API void** __cudaRegisterFatBinary(void*) { static void* handle[2]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API char __cudaInitModule(void**) { return 1; }
API int __cudaGetKernel(void** kernel, const void* function) { *kernel = const_cast<void*>(function); return abi::SUCCESS; }

namespace {
struct Configuration { abi::Dim3 grid, block; size_t shared; void* stream; };
thread_local std::vector<Configuration> configurations;
}  // namespace
API unsigned __cudaPushCallConfiguration(abi::Dim3 grid, abi::Dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API int __cudaPopCallConfiguration(abi::Dim3* grid, abi::Dim3* block, size_t* shared, void** stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *stream = last.stream;
  return abi::SUCCESS;
}
API int cudaFuncGetAttributes(abi::FunctionAttributes* to, const void*) {
  memset(to, 0, sizeof *to);
  to->max_threads_per_block = 1024;
  to->num_regs = 32;
  to->ptx_version = to->binary_version = compiled_for();  // cub looks for code that torch has for the card
  to->max_dynamic_shared_size_bytes = int(most_shared_of_block());
  return abi::SUCCESS;
}
// More shared memory than a block has is refused, as on the card: a kernel made for a larger one cannot run.
static int set_attribute(int which, int value) {
  bool is_too_large = which == abi::FUNCTION_SHARED && size_t(value) > most_shared_of_block();
  return is_too_large ? record(abi::INVALID_VALUE) : abi::SUCCESS;
}
API int cudaFuncSetAttribute(const void*, int which, int value) { return set_attribute(which, value); }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return abi::SUCCESS; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return abi::SUCCESS; }
API int cudaGetSymbolAddress(void** p, const void*) { static char somewhere[1 << 16]; *p = somewhere; return abi::SUCCESS; }
API int cudaMemcpyToSymbol() { return abi::SUCCESS; }

API int cudaLaunchKernel(const void*, abi::Dim3, abi::Dim3, void**, size_t, void* stream) { return launched(KERNELS, stream); }
API int __cudaLaunchKernel(void*, abi::Dim3, abi::Dim3, void**, size_t, void* stream) { return launched(KERNELS, stream); }
API int cudaLaunchCooperativeKernel(const void*, abi::Dim3, abi::Dim3, void**, size_t, void* stream) { return launched(KERNELS, stream); }
namespace {
struct RuntimeLaunch { abi::Dim3 grid, block; size_t shared; void* stream; };             // cudaLaunchConfig_t, its beginning
struct DriverLaunch { unsigned grid[3], block[3], shared; void* stream; };                // CUlaunchConfig, its beginning
}  // namespace
API int cudaLaunchKernelExC(const RuntimeLaunch* with, const void*, void**) { return launched(KERNELS, with->stream); }
API int cuLaunchKernelEx(const DriverLaunch* with, void*, void**, void**) { return launched(KERNELS, with->stream); }
API int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void**, void**) {
  return launched(KERNELS, stream);
}

static int make(void** handle) { *handle = reinterpret_cast<void*>(next_handle()); return abi::SUCCESS; }
API int cudaLibraryLoadData(void** library, ...) { return make(library); }
API int cudaLibraryGetKernel(void** kernel, void*, const char*) { return make(kernel); }
API int cudaLibraryUnload() { return abi::SUCCESS; }
API int cudaKernelSetAttributeForDevice(void*, int which, int value, int) { return set_attribute(which, value); }
API int cuModuleLoadData(void** module, const void*) { return make(module); }
API int cuModuleLoadDataEx(void** module, ...) { return make(module); }
API int cuModuleLoad(void** module, const char*) { return make(module); }
API int cuModuleGetFunction(void** function, void*, const char*) { return make(function); }
API int cuModuleUnload() { return abi::SUCCESS; }
API int cuFuncSetAttribute(void*, int which, int value) { return set_attribute(which, value); }
API int cuFuncSetCacheConfig() { return abi::SUCCESS; }
API int cuFuncGetAttribute(int* value, int which, void*) {
  *value = which == abi::FUNCTION_REGISTERS ? 32 : which == abi::FUNCTION_MAX_THREADS ? 1024 : 0;
  return abi::SUCCESS;
}
// NVRTC asks the driver for its cache of compiled code, and does without one only where it is told that there is none.
API int cuGetExportTable(const void** table, const void*) { *table = nullptr; return abi::NOT_FOUND; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { *n = 2; return abi::SUCCESS; }

// A function of the driver by its name, under the latest of its versions. What is not here is not found.
static int entry_point(const char* name, void** function, int* found) {
  char versioned[128];
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"}) {
    snprintf(versioned, sizeof versioned, "%s%s", name, suffix);
    if (!*function) *function = dlsym(RTLD_DEFAULT, versioned);
  }
  if (found) *found = *function ? 0 : 1;  // cudaDriverEntryPointSymbolNotFound
  return abi::SUCCESS;
}
API int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* found) { return entry_point(name, function, found); }
API int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* found) { return entry_point(name, function, found); }
API int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) { return entry_point(name, function, found); }

// cuBLAS. The stream of a handle is kept, since products are launched on it.
namespace {
std::map<void*, void*> streams_of_handles;
int product(void* handle) {
  void* stream;
  {
    Lock hold(lock);
    stream = streams_of_handles[handle];
  }
  return launched(PRODUCTS, stream) ? 14 : abi::BLAS_SUCCESS;  // CUBLAS_STATUS_INTERNAL_ERROR where the device has ended
}
}  // namespace
API int cublasCreate_v2(void** handle) { return make(handle); }
API int cublasSetStream_v2(void* handle, void* stream) {
  Lock hold(lock);
  streams_of_handles[handle] = stream;
  return abi::BLAS_SUCCESS;
}
API int cublasGetMathMode(void*, int* mode) { *mode = 0; return abi::BLAS_SUCCESS; }
API int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return abi::BLAS_SUCCESS; }
API size_t cublasLtGetVersion() { return CUDA_MAJOR * 10000; }
API int cublasLtMatmulDescCreate(void** to, int, int) { return make(to); }
API int cublasLtMatmulPreferenceCreate(void** to) { return make(to); }
API int cublasLtMatrixLayoutCreate(void** to, int, uint64_t, uint64_t, int64_t) { return make(to); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, abi::BlasHeuristic* to, int* n) {
  memset(to, 0, sizeof *to);
  *n = 1;
  return abi::BLAS_SUCCESS;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                       void*, void*, const void*, void*, size_t, void* stream) {
  return launched(PRODUCTS, stream) ? 14 : abi::BLAS_SUCCESS;
}
#define NOTHING_TO_DO(name) API int name() { return 0; }
NOTHING_TO_DO(cublasDestroy_v2) NOTHING_TO_DO(cublasSetMathMode) NOTHING_TO_DO(cublasSetPointerMode_v2)
NOTHING_TO_DO(cublasSetWorkspace_v2) NOTHING_TO_DO(cublasSetSmCountTarget)
NOTHING_TO_DO(cublasLtMatmulDescDestroy) NOTHING_TO_DO(cublasLtMatmulDescSetAttribute)
NOTHING_TO_DO(cublasLtMatmulPreferenceDestroy) NOTHING_TO_DO(cublasLtMatmulPreferenceSetAttribute)
NOTHING_TO_DO(cublasLtMatrixLayoutDestroy) NOTHING_TO_DO(cublasLtMatrixLayoutSetAttribute)
NOTHING_TO_DO(cudaProfilerStart) NOTHING_TO_DO(cudaProfilerStop) NOTHING_TO_DO(cudaDeviceEnablePeerAccess)

// cuFFT. A transform is a kernel; one of several dimensions, or that no block of threads holds, takes a workspace of its size.
API int cufftCreate(int* plan) { *plan = static_cast<int>(next_handle() & 0x7fffffff); return 0; }
API int cufftXtMakePlanMany(int, int rank, const long long* n, const long long*, long long, long long, int, const long long*,
                            long long, long long, int, long long batch, size_t* workspace, int) {
  constexpr size_t POINT = 8, HELD = 32768;  // bytes of a complex number, and of what a block of threads holds
  size_t bytes = POINT;
  for (int i = 0; i < rank; ++i) bytes *= n[i];
  *workspace = rank > 1 || bytes > HELD ? bytes * batch : 0;
  return 0;
}
API int cufftXtExec(int, void*, void*, int) { return launched(KERNELS, nullptr) ? 6 : 0; }  // CUFFT_EXEC_FAILED
NOTHING_TO_DO(cufftDestroy) NOTHING_TO_DO(cufftSetStream) NOTHING_TO_DO(cufftSetWorkArea) NOTHING_TO_DO(cufftSetAutoAllocation)

// cuSOLVER. Its solvers find zeros, and take no workspace: how large one is only cuSOLVER knows.
API int cusolverDnCreate(void** handle) { return make(handle); }
API int cusolverDnCreateGesvdjInfo(void** made) { return make(made); }
API int cusolverDnCreateParams(void** made) { return make(made); }
namespace {
int solved() { return launched(KERNELS, nullptr) ? 6 : 0; }  // CUSOLVER_STATUS_EXECUTION_FAILED
}  // namespace
#define SOLVER(name) API int name() { return solved(); }
#define WRITES_ZERO(name, position, type, times)                                      \
  API int name(void* first, ...) {                                                    \
    va_list given;                                                                    \
    va_start(given, first);                                                           \
    for (int i = 2; i < position; ++i) va_arg(given, void*);                          \
    for (int i = 0; i < times; ++i) *va_arg(given, type*) = 0;                        \
    va_end(given);                                                                    \
    return 0;                                                                         \
  }

// cuSPARSE, as far as products and orders of matrices go. Its workspaces are missing, too, and a product of two sparse
// matrices has no elements.
#define MAKES(name) API int name(void** made) { return make(made); }
MAKES(cusparseCreate) MAKES(cusparseCreateCsr) MAKES(cusparseCreateCoo) MAKES(cusparseCreateDnMat) MAKES(cusparseCreateDnVec)
MAKES(cusparseCreateMatDescr) MAKES(cusparseSpGEMM_createDescr) MAKES(cusparseSpSM_createDescr) MAKES(cusparseSpSV_createDescr)
NOTHING_TO_DO(cusparseDestroy) NOTHING_TO_DO(cusparseDestroySpMat) NOTHING_TO_DO(cusparseDestroyDnMat)
NOTHING_TO_DO(cusparseDestroyDnVec) NOTHING_TO_DO(cusparseDestroyMatDescr) NOTHING_TO_DO(cusparseSpGEMM_destroyDescr)
NOTHING_TO_DO(cusparseSpSM_destroyDescr) NOTHING_TO_DO(cusparseSpSV_destroyDescr) NOTHING_TO_DO(cusparseSetStream)
NOTHING_TO_DO(cusparseSetPointerMode) NOTHING_TO_DO(cusparseSetMatType) NOTHING_TO_DO(cusparseSetMatFillMode)
NOTHING_TO_DO(cusparseSetMatDiagType) NOTHING_TO_DO(cusparseSetMatIndexBase) NOTHING_TO_DO(cusparseCsrSetStridedBatch)
NOTHING_TO_DO(cusparseCsrSetPointers) NOTHING_TO_DO(cusparseDnMatSetStridedBatch) NOTHING_TO_DO(cusparseSpMatSetAttribute)
SOLVER(cusparseSpMV) SOLVER(cusparseSpMM) SOLVER(cusparseSDDMM) SOLVER(cusparseSDDMM_preprocess) SOLVER(cusparseSpSV_analysis)
SOLVER(cusparseSpSV_solve) SOLVER(cusparseSpSM_analysis) SOLVER(cusparseSpSM_solve) SOLVER(cusparseSpGEMM_copy)
SOLVER(cusparseXcoo2csr) SOLVER(cusparseXcoosortByRow) SOLVER(cusparseXcsrsort) SOLVER(cusparseCreateIdentityPermutation)
WRITES_ZERO(cusparseSpMV_bufferSize, 10, size_t, 1) WRITES_ZERO(cusparseSpMM_bufferSize, 11, size_t, 1)
WRITES_ZERO(cusparseSpSV_bufferSize, 10, size_t, 1) WRITES_ZERO(cusparseSpSM_bufferSize, 11, size_t, 1)
WRITES_ZERO(cusparseSDDMM_bufferSize, 11, size_t, 1) WRITES_ZERO(cusparseSpGEMM_workEstimation, 12, size_t, 1)
WRITES_ZERO(cusparseSpGEMM_compute, 12, size_t, 1) WRITES_ZERO(cusparseSpMatGetSize, 2, int64_t, 3)
WRITES_ZERO(cusparseXcoosort_bufferSizeExt, 7, size_t, 1) WRITES_ZERO(cusparseXcsrsort_bufferSizeExt, 7, size_t, 1)
API const char* cusparseGetErrorString(int) { return "not supported by the emulated device"; }

// The builder writes a list of what else torch calls: absent.inc
extern "C" int emulated_absent(const char* name, int code) {
  fprintf(stderr, "emulated device: %s is not supported\n", name);
  return code;
}
// cuDNN plans its work on the card; the device has operators of its own in its place (values.py).
API int cudnnCreate() { return emulated_absent("cuDNN", 1001); }  // CUDNN_STATUS_NOT_INITIALIZED
#define PRODUCT(name) API int name(void* handle) { return product(handle); }
#define ABSENT(name, code) \
  API int name() { static bool said = false; if (said) return code; said = true; return emulated_absent(#name, code); }
#include "absent.inc"
