// What a program on the device asks of the device itself: counters, neighbours and faults (control.py)
#include "device.h"
#include <chrono>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>

using namespace device;

namespace {

// A c10::DataPtr: it is returned as C++ returns what has a destructor, and begins with the address.
struct Pointer { void* parts[4]; ~Pointer() {} };
using Allocate = Pointer (*)(void* allocator, size_t bytes);
Allocate original = nullptr;
struct TorchStream { int16_t device; int64_t id; };  // a c10::cuda::CUDAStream
using CurrentStream = TorchStream (*)(int8_t device);
using HandleOf = void* (*)(const TorchStream* stream);
CurrentStream current_stream = nullptr;
HandleOf handle_of = nullptr;
long allocations_before = -1, allocations_failing = 0;

void clear(char* from, size_t bytes) {  // whole pages go back to the host, so that what was never written costs nothing
  constexpr uintptr_t PAGE = 4096;
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + PAGE - 1) / PAGE * PAGE);
  char* last = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + bytes) / PAGE * PAGE);
  if (bytes < 16 * PAGE || madvise(first, size_t(last - first), MADV_DONTNEED)) {
    memset(from, 0, bytes);
  } else {
    memset(from, 0, size_t(first - from));
    memset(last, 0, size_t(from + bytes - last));
  }
}

// An allocation that is to fail asks for more than the card has, so that torch fails as it does on a full one: it looks in
// its cache, asks the device, empties the cache, asks again, and raises. Memory is handed out empty: no kernel writes its
// result, and a loss would read what stood there before. What is pending on the stream may read it still.
Pointer allocate(void* allocator, size_t bytes) {
  ++counts[ALLOCATIONS];
  bool fails = allocations_failing > 0 && allocations_before-- <= 0;
  if (fails) --allocations_failing;
  Pointer made = original(allocator, fails ? settings().memory + bytes : bytes);
  if (!bytes) return made;
  auto* memory = static_cast<char*>(made.parts[0]);
  TorchStream torchs = current_stream(-1);
  Lock hold(lock);
  Stream* on = stream_of(handle_of(&torchs));
  on->pending.empty() ? clear(memory, bytes) : run(on, [=] { clear(memory, bytes); });
  return made;
}

}  // namespace

API void emulated_counters(long* to) { for (int i = 0; i < COUNTS; ++i) to[i] = counts[i]; }
API int emulated_number_of_counters() { return COUNTS; }
API size_t emulated_used(int device) { Lock hold(lock); return used[device]; }
API size_t emulated_context() { return settings().context; }
API void emulated_set_memory(size_t bytes) { Lock hold(lock); settings().memory = bytes; }
API void emulated_set_lag(long launches) { Lock hold(lock); settings().lag = launches; }
// Waits for what is pending on a stream, for so long at most; it is no wait of the program's.
API void emulated_settle(void* stream, long milliseconds) {
  Lock hold(lock);
  Stream* on = stream_of(stream);
  changed.wait_for(hold, std::chrono::milliseconds(milliseconds), [=] { return on->pending.empty(); });
}
API void emulated_product(void* stream) { launched(PRODUCTS, stream); }
API void emulated_set_neighbour(size_t bytes, int device) { Lock hold(lock); neighbour[device] = bytes; }
API void emulated_fail_device_allocations(long before, long failing) {
  Lock hold(lock);
  faults.mallocs_before = before;
  faults.mallocs_failing = failing;
}
API void emulated_end_device(long launches_before, int error) {
  Lock hold(lock);
  faults.error = error;
  faults.launches_before = launches_before;
}
API void emulated_end_faults() {
  Lock hold(lock);
  faults = {};
  restore();
}
API void emulated_hang_collective(long collectives_before) { Lock hold(lock); faults.collectives_before = collectives_before; }

API void emulated_fail_allocations(long before, long failing) {
  allocations_before = before;
  allocations_failing = failing;
}

// A symbol of torch's, or none and a line that names it.
static void* symbol_of(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) fprintf(stderr, "emulated device: libc10_cuda.so has no %s: no allocation can be made to fail\n", name);
  return found;
}

// Stands in front of the allocator's virtual function `allocate`, the first after the destructors (c10/core/Allocator.h),
// from the first memory on that torch takes of the device.
void device::watch_allocations() {
  static bool watched = false;
  if (watched) return;
  void* c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!c10) return;
  auto* held = static_cast<std::atomic<void**>*>(symbol_of(c10, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
  watched = !held;  // said once
  if (!held || !held->load()) return;
  watched = true;
  void** object = held->load();
  constexpr int BEFORE = 2, FUNCTIONS = 96, ALLOCATE = 2;  // offset and type information stand before the functions
  static void* table[BEFORE + FUNCTIONS];
  memcpy(table, static_cast<void**>(*object) - BEFORE, sizeof table);
  current_stream = reinterpret_cast<CurrentStream>(symbol_of(c10, "_ZN3c104cuda20getCurrentCUDAStreamEa"));
  handle_of = reinterpret_cast<HandleOf>(symbol_of(c10, "_ZNK3c104cuda10CUDAStream6streamEv"));
  if (!current_stream || !handle_of) return;
  original = reinterpret_cast<Allocate>(table[BEFORE + ALLOCATE]);
  table[BEFORE + ALLOCATE] = reinterpret_cast<void*>(allocate);
  *object = table + BEFORE;
}
