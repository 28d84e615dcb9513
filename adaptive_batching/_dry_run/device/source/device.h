// The state of the devices of this process, which every part of the library works on with `lock` held.
#pragma once
#include "abi.h"
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace device {

constexpr size_t MIB = size_t{1} << 20;
constexpr int MAX_DEVICES = 16;

// What the card is: read once from the environment (launch.py); its memory can be set (control.py)
struct Settings {
  size_t memory, context, largest_copy;
  long lag;  // launches; 0: all that is asked for has happened at once; negative: only when the host waits for it
  int count, capability, processors;
  const char* name;
};
Settings& settings();

// What the host asked of the device: exact, and the same on every machine
enum Count {
  KERNELS, PRODUCTS, SYNCHRONIZATIONS, DEVICE_ALLOCATIONS, DEVICE_FREES, COPIES_TO_DEVICE, COPIES_TO_HOST, COPIES_WITHIN,
  COLLECTIVES, ALLOCATIONS, COUNTS
};
extern std::atomic<long> counts[COUNTS];

// Never destroyed, as a thread waits for them until the process is gone
extern std::mutex& lock;
extern std::condition_variable& changed;  // when something that is pending has happened
using Lock = std::unique_lock<std::mutex>;

extern thread_local int current;  // device of this thread
int record(int error);  // as cudaGetLastError would find it; returns the error
void restore();         // ends the error that ended the device
int standing();         // the error that ended the device, if one did: every call returns it from then on
uintptr_t next_handle();

// Streams. An operation is done when what was pending before it on its stream is, and when the lag is over.
struct Stream;
struct Moment { Stream* stream; uint64_t at; };  // behind the operation of that number
struct Pending { uint64_t at; std::function<bool()> advance; };  // true when it has happened
struct Graph { uint64_t id; bool open; std::atomic<long> launches[COUNTS]; };  // what is launched on streams that capture
struct Stream {
  std::shared_ptr<Graph> capture;      // the last that it began or joined
  uint64_t submitted = 0, waited = 0;  // the last operation; the last one that the host has waited for
  std::deque<Pending> pending;         // what takes time: collectives, and what stands behind them
  struct Dependency { uint64_t at; Moment on; };
  std::deque<Dependency> dependencies;
};
Stream* stream_of(void* handle);
inline Graph* capture_of(Stream* on) { return on->capture && on->capture->open ? on->capture.get() : nullptr; }
extern int captures;  // under way
uint64_t submit(Stream*);
void run(Stream*, std::function<void()> work);         // now, or behind what is pending
void run_until(Stream*, std::function<bool()> work);   // is tried until it says true
void wait(Lock&, Moment);
void wait_for_all(Lock&);
size_t most_shared_of_block();           // memory that a block of threads may ask for
int launched(Count what, void* stream);  // a kernel, or a product; returns the error of the call

// Faults, set through control.cpp
struct Faults {
  long mallocs_before = -1, mallocs_failing = 0;  // cudaMalloc and cuMemCreate
  long launches_before = -1;                      // then `error` stands
  int error = 0;
  long collectives_before = -1;                   // then one never ends
};
extern Faults faults;
bool memory_fault();
void watch_allocations();  // of torch's, once it has an allocator

// Cards. Where the environment names a folder of the machine, its processes share the cards, as on a real one.
const char* machine();         // the folder; null where each process has all cards to itself
int visible_cards();           // of CUDA_VISIBLE_DEVICES
int card_of(int device);       // the number of a device's card in the machine
struct Shared { Shared(); ~Shared(); };  // while one lives, no other process takes memory
size_t taken_by_others(int device);
void tell_others(size_t bytes, int device);  // how much this process has of a device's card

// Memory, with the lock held
extern size_t used[MAX_DEVICES], neighbour[MAX_DEVICES];
bool take(size_t bytes, int device);
void give(size_t bytes, int device);
bool on_device(const void*);
void move(void* to, const void* from, size_t bytes);  // what fits the largest copy, or goes to the host
void touch(const void*, size_t bytes);                // managed memory becomes resident

}  // namespace device
