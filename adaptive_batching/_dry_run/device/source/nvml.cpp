// NVML, as far as torch calls it: for expandable segments, and for the processes that an out-of-memory error names. It is a
// library of its own, as torch looks for it by name.
#include "abi.h"
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

extern "C" size_t emulated_used(int device);
extern "C" int emulated_cards();
extern "C" size_t emulated_taken_of_card(int card);
extern "C" size_t emulated_context();
extern "C" int cuDeviceTotalMem_v2(size_t* n, int device);
extern "C" int cuDeviceGetName(char* to, int n, int device);

namespace {
enum { NVML_SUCCESS = 0, NVML_NOT_SUPPORTED = 3 };
struct Process { unsigned id; unsigned long long used; };  // nvmlProcessInfo_v1_t
struct Memory { unsigned long long total, free, used; };     // nvmlMemory_t
struct Utilization { unsigned processors, memory; };         // nvmlUtilization_t
int index_of(void* handle) { return int(reinterpret_cast<size_t>(handle)) - 1; }
}  // namespace

API int nvmlInit() { return NVML_SUCCESS; }
API int nvmlInit_v2() { return NVML_SUCCESS; }
API int nvmlInitWithFlags(unsigned) { return NVML_SUCCESS; }
API int nvmlShutdown() { return NVML_SUCCESS; }
API int nvmlDeviceGetCount_v2(int* n) { *n = emulated_cards(); return NVML_SUCCESS; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
  unsigned domain, number = 1;
  sscanf(bus, "%x:%x", &domain, &number);
  *handle = reinterpret_cast<void*>(size_t(number));
  return NVML_SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(size_t(index) + 1);
  return NVML_SUCCESS;
}
API int nvmlDeviceGetName(void* handle, char* to, unsigned n) { return cuDeviceGetName(to, int(n), index_of(handle)); }
API int nvmlDeviceGetMemoryInfo(void* handle, Memory* to) {
  size_t shared = emulated_taken_of_card(index_of(handle)), total = 0;
  size_t used = shared ? shared : emulated_used(index_of(handle)) + emulated_context();
  cuDeviceTotalMem_v2(&total, index_of(handle));
  *to = {total, total - used, used};
  return NVML_SUCCESS;
}
API int nvmlDeviceGetUtilizationRates(void*, Utilization* to) { *to = {0, 0}; return NVML_SUCCESS; }
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NVML_NOT_SUPPORTED; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDA_MAJOR * 1000; return NVML_SUCCESS; }
API int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* n, Process* to) {
  *n = 1;
  to[0] = {unsigned(getpid()), emulated_used(index_of(handle)) + emulated_context()};
  return NVML_SUCCESS;
}
