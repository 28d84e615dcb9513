// What a program on the device asks of the device itself: counters, neighbours and faults (control.py)
#include "device.h"
#include <cstring>
#include <dlfcn.h>

using namespace device;

namespace {

// A c10::DataPtr, returned as C++ returns what has a destructor; only its making is passed on.
struct Pointer { void* parts[4]; ~Pointer(); };
using Allocate = Pointer (*)(void* allocator, size_t bytes);
Allocate original = nullptr;
long allocations_before = -1, allocations_failing = 0;

// torch's allocator is asked for more than the card has, so that it fails as it does on a full one: it looks in its cache,
// asks the device, empties the cache, asks again, and raises.
Pointer allocate(void* allocator, size_t bytes) {
  ++counts[ALLOCATIONS];
  if (allocations_failing > 0 && allocations_before-- <= 0) {
    --allocations_failing;
    return original(allocator, settings().memory + bytes);
  }
  return original(allocator, bytes);
}

}  // namespace

API void emulated_counters(long* to) { for (int i = 0; i < COUNTS; ++i) to[i] = counts[i]; }
API int emulated_number_of_counters() { return COUNTS; }
API size_t emulated_used(int device) { Lock hold(lock); return used[device]; }
API size_t emulated_context() { return settings().context; }
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
API void emulated_hang_collective(long collectives_before) { Lock hold(lock); faults.collectives_before = collectives_before; }

// Puts itself in front of the allocator's virtual function `allocate`, the first after the destructors (c10/core/Allocator.h).
API int emulated_watch_allocations() {
  if (original) return 1;
  void* c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!c10) return 0;
  auto* held = static_cast<std::atomic<void**>*>(dlsym(c10, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
  if (!held || !held->load()) return 0;
  void** object = held->load();
  constexpr int BEFORE = 2, FUNCTIONS = 96, ALLOCATE = 2;  // offset and type information stand before the functions
  static void* table[BEFORE + FUNCTIONS];
  memcpy(table, static_cast<void**>(*object) - BEFORE, sizeof table);
  original = reinterpret_cast<Allocate>(table[BEFORE + ALLOCATE]);
  table[BEFORE + ALLOCATE] = reinterpret_cast<void*>(allocate);
  *object = table + BEFORE;
  return 1;
}
API void emulated_fail_allocations(long before, long failing) {
  allocations_before = before;
  allocations_failing = failing;
}
