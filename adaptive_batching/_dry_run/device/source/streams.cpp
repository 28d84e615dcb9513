// Devices, errors, streams and events. What takes time (a collective that other ranks have not joined yet, and what stands
// behind it) is pending, and a thread moves it on, as a device does. All else happens when it is asked for; with a lag,
// events say so later.
#include "device.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

using namespace device;

namespace device {

std::atomic<long> counts[COUNTS];
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
thread_local int current = 0;
Faults faults;

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

Settings& settings() {
  static const char* name = getenv("EMULATED_DEVICE_NAME");
  static Settings read = {
      size_t(setting("EMULATED_DEVICE_MEMORY", 80L << 30)), size_t(setting("EMULATED_DEVICE_CONTEXT", 500L << 20)),
      size_t(setting("EMULATED_DEVICE_LARGEST_COPY", 1L << 20)), setting("EMULATED_DEVICE_LAG", 0),
      int(setting("EMULATED_DEVICE_COUNT", 1)), int(setting("EMULATED_DEVICE_CAPABILITY", 80)),
      int(setting("EMULATED_DEVICE_PROCESSORS", 108)), name && *name ? name : "emulated device"};
  return read;
}

static thread_local int last_error = abi::SUCCESS;
static std::atomic<int> ended{0};  // the error that ended the device
int record(int error) { return last_error = error; }
int standing() { return ended; }
void restore() { ended = last_error = abi::SUCCESS; }
uintptr_t next_handle() {
  static std::atomic<uintptr_t> last{0x1000};
  return last += 16;
}

static auto& streams = *new std::map<std::pair<int, void*>, std::unique_ptr<Stream>>;
static uint64_t operations = 0;

Stream* stream_of(void* handle) {
  bool by_device = reinterpret_cast<uintptr_t>(handle) < 0x1000;  // the default streams
  auto& stream = streams[{by_device ? current : -1, handle}];
  if (!stream) stream = std::make_unique<Stream>();
  return stream.get();
}

uint64_t submit(Stream* stream) { return stream->submitted = ++operations; }

static bool happened(const Moment& moment) {
  return moment.stream->pending.empty() || moment.stream->pending.front().at > moment.at;
}
static bool reported(const Moment& moment) {
  long lag = settings().lag;
  if (!happened(moment)) return false;
  return lag == 0 || moment.at <= moment.stream->waited || (lag > 0 && moment.at + lag <= operations);
}

static void advance() {  // for as long as anything is pending
  Lock hold(lock);
  for (;;) {
    bool idle = true;
    for (auto& [key, stream] : streams) {
      while (!stream->pending.empty() && stream->pending.front().advance()) {
        stream->pending.pop_front();
        changed.notify_all();
      }
      idle = idle && stream->pending.empty();
    }
    if (idle) {
      changed.wait(hold);
    } else {
      hold.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      hold.lock();
    }
  }
}

void run_until(Stream* stream, std::function<bool()> work) {
  if (stream->pending.empty() && work()) return;
  static std::thread thread = [] {
    std::thread started(advance);
    started.detach();
    return started;
  }();
  stream->pending.push_back({stream->submitted, std::move(work)});
  changed.notify_all();
}
void run(Stream* stream, std::function<void()> work) {
  run_until(stream, [work = std::move(work)] { work(); return true; });
}

void wait(Lock& hold, Moment moment) {
  changed.wait(hold, [&] { return happened(moment) || ended; });
  Stream* stream = moment.stream;
  if (moment.at > stream->waited) stream->waited = moment.at;
  while (!stream->dependencies.empty() && stream->dependencies.front().at <= moment.at) {
    Moment on = stream->dependencies.front().on;
    stream->dependencies.pop_front();
    if (on.at > on.stream->waited) wait(hold, on);
  }
}
void wait_for_all(Lock& hold) {
  std::vector<Stream*> all;
  for (auto& [key, stream] : streams) all.push_back(stream.get());
  for (Stream* stream : all) wait(hold, {stream, stream->submitted});
}

int launched(Count what, void* stream) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Stream* on = stream_of(stream);
  Graph* graph = capture_of(on);
  ++(graph ? graph->launches[what] : counts[what]);
  submit(on);
  if (faults.launches_before >= 0 && faults.launches_before-- == 0) ended = faults.error;
  return abi::SUCCESS;
}

bool memory_fault() {
  if (faults.mallocs_failing <= 0 || faults.mallocs_before-- > 0) return false;
  --faults.mallocs_failing;
  return true;
}

}  // namespace device

// Devices
API int cudaGetDeviceCount(int* n) {
  *n = visible_cards();
  return *n ? abi::SUCCESS : record(abi::NO_DEVICE);
}
API int cudaSetDevice(int d) {
  if (d < 0 || d >= visible_cards()) return record(abi::INVALID_DEVICE);
  current = d;
  return abi::SUCCESS;
}
API int cudaGetDevice(int* d) { *d = current; return abi::SUCCESS; }
API int cudaDriverGetVersion(int* v) { *v = CUDA_MAJOR * 1000; return abi::SUCCESS; }
API int cudaRuntimeGetVersion(int* v) { *v = CUDA_MAJOR * 1000; return abi::SUCCESS; }
API int cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return abi::SUCCESS; }
API int cudaDeviceGetStreamPriorityRange(int* low, int* high) { *low = 0; *high = -5; return abi::SUCCESS; }
API int cudaDeviceGetPCIBusId(char* to, int n, int d) { snprintf(to, n, "0000:%02x:00.0", card_of(d) + 1); return abi::SUCCESS; }

// From CUDA's programming guide, "Technical Specifications per Compute Capability"; memory in KiB
struct Specification { int capability, shared_of_processor, shared_of_block, threads, blocks; };
static const Specification& specification() {
  static constexpr Specification all[] = {
      {60, 64, 48, 2048, 32}, {61, 96, 48, 2048, 32}, {70, 96, 96, 2048, 32}, {75, 64, 64, 1024, 16},
      {80, 164, 163, 2048, 32}, {86, 100, 99, 1536, 16}, {87, 164, 163, 1536, 16}, {89, 100, 99, 1536, 24},
      {90, 228, 227, 2048, 32}, {120, 100, 99, 1536, 24}};  // 10.x as 9.0
  const Specification* found = all;
  for (auto& one : all) if (one.capability <= settings().capability) found = &one;
  return *found;
}
size_t device::most_shared_of_block() { return size_t(specification().shared_of_block) << 10; }

static int attribute(int which) {
  switch (which) {
    case abi::MAX_THREADS_PER_BLOCK: case abi::MAX_BLOCK_DIM_X: case abi::MAX_BLOCK_DIM_Y: return 1024;
    case abi::MAX_BLOCK_DIM_Z: return 64;
    case abi::MAX_GRID_DIM_X: return 2147483647;
    case abi::MAX_GRID_DIM_Y: case abi::MAX_GRID_DIM_Z: return 65535;
    case abi::MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case abi::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return specification().shared_of_block << 10;
    case abi::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return specification().shared_of_processor << 10;
    case abi::RESERVED_SHARED_MEMORY_PER_BLOCK: return settings().capability >= 80 ? 1024 : 0;
    case abi::WARP_SIZE: return 32;
    case abi::MAX_REGISTERS_PER_BLOCK: case abi::MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case abi::MULTIPROCESSOR_COUNT: return settings().processors;
    case abi::MAX_THREADS_PER_MULTIPROCESSOR: return specification().threads;
    case abi::MAX_BLOCKS_PER_MULTIPROCESSOR: return specification().blocks;
    case abi::CAPABILITY_MAJOR: return settings().capability / 10;
    case abi::CAPABILITY_MINOR: return settings().capability % 10;
    case abi::L2_CACHE_SIZE: return 40 * MIB;
    case abi::TEXTURE_ALIGNMENT: return 512;
    case abi::CONCURRENT_KERNELS: case abi::UNIFIED_ADDRESSING: case abi::ASYNC_ENGINE_COUNT: case abi::MEMORY_POOLS:
    case abi::COOPERATIVE_LAUNCH: case abi::MANAGED_MEMORY: case abi::CAN_MAP_HOST_MEMORY:
    case abi::CONCURRENT_MANAGED_ACCESS: case abi::VIRTUAL_MEMORY_MANAGEMENT: return 1;
    default: return 0;
  }
}
API int cudaDeviceGetAttribute(int* value, int which, int d) {
  if (d < 0 || d >= visible_cards()) return record(abi::INVALID_DEVICE);
  *value = attribute(which);
  return abi::SUCCESS;
}

#if CUDA_MAJOR < 13
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif
API int cudaGetDeviceProperties(void* to, int d) {
  abi::DeviceProperties p = {};
  snprintf(p.name, sizeof p.name, "%s", settings().name);
  p.uuid[15] = char(card_of(d));  // as nvidia-smi writes it: GPU-...-000000000001
  p.total_global_mem = settings().memory;
  p.total_const_mem = 65536;
  p.mem_pitch = 2147483647;
  p.memory_bus_width = 5120;
  p.pci_bus_id = card_of(d) + 1;
  p.major = attribute(abi::CAPABILITY_MAJOR);
  p.minor = attribute(abi::CAPABILITY_MINOR);
  p.multi_processor_count = attribute(abi::MULTIPROCESSOR_COUNT);
  p.warp_size = attribute(abi::WARP_SIZE);
  p.shared_mem_per_block = attribute(abi::MAX_SHARED_MEMORY_PER_BLOCK);
  p.shared_mem_per_block_optin = attribute(abi::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p.shared_mem_per_multiprocessor = attribute(abi::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p.reserved_shared_mem_per_block = attribute(abi::RESERVED_SHARED_MEMORY_PER_BLOCK);
  p.regs_per_block = p.regs_per_multiprocessor = attribute(abi::MAX_REGISTERS_PER_BLOCK);
  p.max_threads_per_block = attribute(abi::MAX_THREADS_PER_BLOCK);
  p.max_threads_per_multi_processor = attribute(abi::MAX_THREADS_PER_MULTIPROCESSOR);
  p.max_blocks_per_multi_processor = attribute(abi::MAX_BLOCKS_PER_MULTIPROCESSOR);
  for (int i : {0, 1, 2}) {
    p.max_threads_dim[i] = attribute(abi::MAX_BLOCK_DIM_X + i);
    p.max_grid_size[i] = attribute(abi::MAX_GRID_DIM_X + i);
  }
  p.texture_alignment = attribute(abi::TEXTURE_ALIGNMENT);
  p.l2_cache_size = attribute(abi::L2_CACHE_SIZE);
  p.unified_addressing = p.concurrent_kernels = p.managed_memory = p.can_map_host_memory = p.cooperative_launch = 1;
  p.memory_pools_supported = p.concurrent_managed_access = p.async_engine_count = 1;
  memcpy(to, &p, abi::DEVICE_PROPERTIES_BYTES);
  return abi::SUCCESS;
}

// Errors
API int cudaGetLastError() {
  int error = standing() ? standing() : last_error;
  last_error = abi::SUCCESS;
  return error;
}
API int cudaPeekAtLastError() { return standing() ? standing() : last_error; }
API const char* cudaGetErrorString(int error) {
  switch (error) {
    case abi::SUCCESS: return "no error";
    case abi::INVALID_VALUE: return "invalid argument";
    case abi::OUT_OF_MEMORY: return "out of memory";
    case abi::NO_DEVICE: return "no CUDA-capable device is detected";
    case abi::INVALID_DEVICE: return "invalid device ordinal";
    case abi::NOT_READY: return "device not ready";
    case abi::ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case abi::LAUNCH_FAILURE: return "unspecified launch failure";
    case abi::NOT_SUPPORTED: return "operation not supported";
    case abi::CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    default: return "unknown error";
  }
}
API const char* cudaGetErrorName(int error) {
  switch (error) {
    case abi::SUCCESS: return "cudaSuccess";
    case abi::INVALID_VALUE: return "cudaErrorInvalidValue";
    case abi::OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case abi::NO_DEVICE: return "cudaErrorNoDevice";
    case abi::INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case abi::NOT_READY: return "cudaErrorNotReady";
    case abi::ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case abi::LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    case abi::NOT_SUPPORTED: return "cudaErrorNotSupported";
    case abi::CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
  }
}

// Streams
API int cudaStreamCreate(void** s) { *s = reinterpret_cast<void*>(next_handle()); return abi::SUCCESS; }
API int cudaStreamCreateWithFlags(void** s, unsigned) { return cudaStreamCreate(s); }
API int cudaStreamCreateWithPriority(void** s, unsigned, int) { return cudaStreamCreate(s); }
API int cudaStreamDestroy(void*) { return abi::SUCCESS; }
API int cudaStreamGetPriority(void*, int* p) { *p = 0; return abi::SUCCESS; }
API int cudaStreamAddCallback(void* s, void (*call)(void*, int, void*), void* with, unsigned) { call(s, abi::SUCCESS, with); return abi::SUCCESS; }
API int cudaLaunchHostFunc(void*, void (*call)(void*), void* with) { call(with); return abi::SUCCESS; }

// `wait_for` says false where a stream that captures forbids it.
static int synchronize(std::function<bool(Lock&)> wait_for) {
  if (int error = standing()) return record(error);
  ++counts[SYNCHRONIZATIONS];
  Lock hold(lock);
  if (!wait_for(hold)) return record(abi::CAPTURE_UNSUPPORTED);
  return standing() ? record(standing()) : abi::SUCCESS;
}
API int cudaStreamSynchronize(void* s) {
  return synchronize([=](Lock& hold) {
    Stream* stream = stream_of(s);
    if (!capture_of(stream)) wait(hold, {stream, stream->submitted});
    return !capture_of(stream);
  });
}
API int cudaDeviceSynchronize() {
  return synchronize([](Lock& hold) {
    if (!captures) wait_for_all(hold);
    return !captures;
  });
}
API int cudaStreamQuery(void* s) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Stream* stream = stream_of(s);
  if (capture_of(stream)) return record(abi::CAPTURE_UNSUPPORTED);
  return reported({stream, stream->submitted}) ? abi::SUCCESS : record(abi::NOT_READY);
}

// Events
namespace {
double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
struct Event { Moment on{nullptr, 0}; double time = 0; std::shared_ptr<Graph> capture; };
Event* event_of(void* e) { return static_cast<Event*>(e); }
}  // namespace

API int cudaEventCreateWithFlags(void** e, unsigned) { *e = new Event; return abi::SUCCESS; }
API int cudaEventCreate(void** e) { return cudaEventCreateWithFlags(e, 0); }
API int cudaEventDestroy(void* e) { delete event_of(e); return abi::SUCCESS; }
API int cudaEventRecord(void* e, void* s) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Stream* stream = stream_of(s);
  *event_of(e) = {{stream, submit(stream)}, now(), stream->capture};
  return abi::SUCCESS;
}
API int cudaEventRecordWithFlags(void* e, void* s, unsigned) { return cudaEventRecord(e, s); }
API int cudaEventQuery(void* e) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Moment on = event_of(e)->on;
  return !on.stream || reported(on) ? abi::SUCCESS : record(abi::NOT_READY);
}
API int cudaEventSynchronize(void* e) {
  return synchronize([=](Lock& hold) {
    if (event_of(e)->on.stream) wait(hold, event_of(e)->on);
    return true;
  });
}
API int cudaStreamWaitEvent(void* s, void* e, unsigned) {
  Lock hold(lock);
  Moment on = event_of(e)->on;
  Stream* stream = stream_of(s);
  if (!on.stream || on.stream == stream) return abi::SUCCESS;
  if (auto& capture = event_of(e)->capture; capture && capture->open) stream->capture = capture;  // it joins
  submit(stream);
  if (settings().lag || !happened(on)) stream->dependencies.push_back({stream->submitted, on});
  if (!happened(on)) run_until(stream, [on] { return happened(on); });
  return abi::SUCCESS;
}
API int cudaEventElapsedTime(float* ms, void* a, void* b) { *ms = float(event_of(b)->time - event_of(a)->time); return abi::SUCCESS; }
API int cudaEventElapsedTime_v2(float* ms, void* a, void* b) { return cudaEventElapsedTime(ms, a, b); }

// The driver's side of it, as far as torch and Triton call it
API int cuInit(unsigned) { return abi::SUCCESS; }
API int cuDriverGetVersion(int* v) { return cudaDriverGetVersion(v); }
API int cuDeviceGetCount(int* n) { return cudaGetDeviceCount(n); }
API int cuDeviceGet(int* d, int n) { *d = n; return abi::SUCCESS; }
API int cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "%s", settings().name); return abi::SUCCESS; }
API int cuDeviceGetAttribute(int* v, int which, int) { *v = attribute(which); return abi::SUCCESS; }
API int cuDeviceTotalMem_v2(size_t* n, int) { *n = settings().memory; return abi::SUCCESS; }
API int cuCtxGetCurrent(void** c) { *c = reinterpret_cast<void*>(size_t(current) + 1); return abi::SUCCESS; }
API int cuCtxSetCurrent(void*) { return abi::SUCCESS; }
API int cuCtxGetDevice(int* d) { *d = current; return abi::SUCCESS; }
API int cuDevicePrimaryCtxRetain(void** c, int d) { *c = reinterpret_cast<void*>(size_t(d) + 1); return abi::SUCCESS; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return abi::SUCCESS; }
API int cuGetErrorString(int error, const char** s) { *s = cudaGetErrorString(error); return abi::SUCCESS; }
API int cuGetErrorName(int error, const char** s) { *s = cudaGetErrorName(error); return abi::SUCCESS; }
