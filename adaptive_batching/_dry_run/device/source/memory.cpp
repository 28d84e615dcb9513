// Memory: cudaMalloc and cuMemCreate count against a limit and fail beyond it. Behind every address stands memory of the
// host that is mapped and not touched until it is written, so that a model larger than the host's memory fits.
#include "device.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace device;

namespace {

enum class Kind { device, host, registered, managed };
struct Block {
  size_t bytes;
  Kind kind;
  int device;
  size_t resident = 0;     // of managed memory, on the device
  uint64_t touched = 0;    // when it was last made resident
};
std::map<uintptr_t, Block> blocks;  // by first address
std::map<uint64_t, Block> pieces;   // of cuMemCreate, by handle
uint64_t touches = 0;

uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

void* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

// Memory of the device lies in a range of its own, each new block below the older ones. The allocator takes the free
// block at the lowest address of several that are as large, so that what it reserves depends on the order: it must be the
// same whatever else the process maps.
void* reserve_on_device(size_t bytes) {
  static std::atomic<uintptr_t> lowest{uintptr_t{1} << 46};
  uintptr_t at = lowest -= rounded(bytes, 2 * MIB);
  void* got = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == reinterpret_cast<void*>(at)) return got;
  if (got != MAP_FAILED) munmap(got, bytes);
  return reserve(bytes);
}

std::map<uintptr_t, Block>::iterator find(const void* p) {
  auto it = blocks.upper_bound(address(p));
  if (it == blocks.begin()) return blocks.end();
  --it;
  return address(p) < it->first + it->second.bytes ? it : blocks.end();
}

size_t resident(int device) {
  size_t sum = 0;
  for (auto& [at, block] : blocks) if (block.kind == Kind::managed && block.device == device) sum += block.resident;
  return sum;
}

size_t room(int device) {  // for allocations and managed memory
  size_t taken = settings().context + neighbour[device] + used[device] + taken_by_others(device);
  return settings().memory > taken ? settings().memory - taken : 0;
}

// Managed memory that was touched longest ago leaves the device in pieces of 2 MiB, as the driver evicts it.
void evict_to(size_t bytes, int device, const Block* keep = nullptr) {
  size_t now = resident(device);
  while (now > bytes) {
    Block* oldest = nullptr;
    for (auto& [at, block] : blocks) {
      if (block.kind != Kind::managed || block.device != device || !block.resident || &block == keep) continue;
      if (!oldest || block.touched < oldest->touched) oldest = &block;
    }
    if (!oldest) return;
    size_t leaves = std::min(oldest->resident, rounded(now - bytes, 2 * MIB));
    oldest->resident -= leaves;
    now -= leaves;
  }
}

// True where the memory is the process's own, so that a page that is given back reads as zeros.
bool is_anonymous(const char* from, size_t bytes) {
  auto it = find(from);
  if (it != blocks.end()) return it->second.kind == Kind::host;
  FILE* maps = fopen("/proc/self/maps", "r");
  if (!maps) return false;
  unsigned long first, last, inode;
  char mode[5], line[512];
  bool found = false;
  while (!found && fgets(line, sizeof line, maps)) {
    if (sscanf(line, "%lx-%lx %4s %*x %*s %lu", &first, &last, mode, &inode) != 4) continue;
    found = first <= address(from) && address(from) + bytes <= last && mode[3] == 'p' && !inode;
  }
  fclose(maps);
  return found;
}

bool clear_and_copy_written(char* to, const char* from, size_t bytes) {
  constexpr size_t PAGE = 4096;
  char* first = reinterpret_cast<char*>(rounded(address(to), PAGE));
  char* last = reinterpret_cast<char*>(address(to + bytes) / PAGE * PAGE);
  if (!is_anonymous(first, size_t(last - first))) return false;
  int file = open("/proc/self/pagemap", O_RDONLY);
  if (file < 0) return false;
  size_t start = address(from) / PAGE, pages = address(from + bytes - 1) / PAGE - start + 1;
  std::vector<uint64_t> map(pages);
  bool read = pread(file, map.data(), 8 * pages, off_t(8 * start)) == ssize_t(8 * pages);
  close(file);
  if (!read || madvise(first, size_t(last - first), MADV_DONTNEED)) return false;
  memset(to, 0, size_t(first - to));
  memset(last, 0, size_t(to + bytes - last));
  for (size_t i = 0; i < pages; ++i) {
    if (!(map[i] >> 62)) continue;  // neither present nor swapped out
    size_t begin = std::max((start + i) * PAGE, address(from)) - address(from);
    size_t end = std::min((start + i + 1) * PAGE, address(from) + bytes) - address(from);
    memcpy(to + begin, from + begin, end - begin);
  }
  return true;
}

int host_block(void** p, size_t bytes, Kind kind) {
  bytes = std::max<size_t>(bytes, 1);
  *p = reserve(bytes);
  if (!*p) return record(abi::OUT_OF_MEMORY);
  Lock hold(lock);
  blocks[address(*p)] = {bytes, kind, current};
  return abi::SUCCESS;
}

int free_block(void* p) {
  auto it = blocks.find(address(p));
  if (it == blocks.end()) return record(abi::INVALID_VALUE);
  if (it->second.kind == Kind::device) give(it->second.bytes, it->second.device);
  munmap(p, it->second.bytes);
  blocks.erase(it);
  return abi::SUCCESS;
}

}  // namespace

namespace device {

size_t used[MAX_DEVICES], neighbour[MAX_DEVICES];

bool take(size_t bytes, int device) {
  watch_allocations();
  Shared hold;
  if (memory_fault() || bytes > room(device)) return false;
  used[device] += bytes;
  tell_others(settings().context + used[device], device);
  evict_to(room(device), device);
  return true;
}

void give(size_t bytes, int device) {
  Shared hold;
  used[device] -= bytes;
  tell_others(settings().context + used[device], device);
}

bool on_device(const void* p) {
  auto it = find(p);
  return it != blocks.end() && it->second.kind == Kind::device;
}

void touch(const void* p, size_t bytes) {
  auto it = find(p);
  if (it == blocks.end() || it->second.kind != Kind::managed) return;
  Block& block = it->second;
  block.touched = ++touches;
  block.resident = std::min({block.bytes, std::max(block.resident, rounded(bytes, 2 * MIB)), room(block.device)});
  evict_to(room(block.device), block.device, &block);
}

// What goes to the host from pages of the device that nothing wrote is zeros, which take no memory there where the pages of
// the host can be given back: a model that moves to the host need not fit it.
void move(void* to, const void* from, size_t bytes) {
  if (bytes <= settings().largest_copy) {
    memmove(to, from, bytes);
  } else if (!on_device(to)) {
    if (!on_device(from) || !clear_and_copy_written(static_cast<char*>(to), static_cast<const char*>(from), bytes)) memmove(to, from, bytes);
  }
}

}  // namespace device

API int cudaMalloc(void** p, size_t bytes) {
  if (int error = standing()) return record(error);
  ++counts[DEVICE_ALLOCATIONS];
  size_t n = rounded(std::max<size_t>(bytes, 1), 2 * MIB);
  Lock hold(lock);
  if (!take(n, current)) return record(abi::OUT_OF_MEMORY);
  *p = reserve_on_device(n);
  if (!*p) {
    give(n, current);
    return record(abi::OUT_OF_MEMORY);
  }
  blocks[address(*p)] = {n, Kind::device, current};
  return abi::SUCCESS;
}
API int cudaFree(void* p) {
  if (!p) return abi::SUCCESS;
  if (int error = standing()) return record(error);
  ++counts[DEVICE_FREES];
  Lock hold(lock);
  wait_for_all(hold);  // cudaFree waits for the device
  return free_block(p);
}
API int cudaMallocAsync(void** p, size_t bytes, void*) { return cudaMalloc(p, bytes); }
API int cudaFreeAsync(void* p, void*) { return cudaFree(p); }
API int cudaMemGetInfo(size_t* free, size_t* all) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Shared cards;
  *all = settings().memory;
  *free = room(current) - std::min(room(current), resident(current));
  return abi::SUCCESS;
}

// Managed memory counts where it lies: on the device from when it is asked to be there, until something else needs the
// room. What a kernel touches without having been asked for is not seen.
API int cudaMallocManaged(void** p, size_t bytes, unsigned) { return host_block(p, bytes, Kind::managed); }
static int prefetch(const void* p, size_t bytes, int device) {
  if (device >= visible_cards()) return record(abi::INVALID_DEVICE);
  Lock hold(lock);
  auto it = find(p);
  if (it == blocks.end() || it->second.kind != Kind::managed) return record(abi::INVALID_VALUE);
  if (device < 0) {
    it->second.resident -= std::min(it->second.resident, rounded(bytes, 2 * MIB));
  } else {
    it->second.device = device;
    touch(p, bytes);
  }
  return abi::SUCCESS;
}
#if CUDA_MAJOR >= 13
API int cudaMemPrefetchAsync(const void* p, size_t bytes, abi::Location to, unsigned, void*) {
#else
API int cudaMemPrefetchAsync(const void* p, size_t bytes, int to, void*) { return prefetch(p, bytes, to); }
API int cudaMemPrefetchAsync_v2(const void* p, size_t bytes, abi::Location to, unsigned, void*) {
#endif
  if (to.type == abi::LOCATION_DEVICE && to.id < 0) return record(abi::INVALID_DEVICE);
  return prefetch(p, bytes, to.type == abi::LOCATION_DEVICE ? to.id : -1);
}

API int cuMemPrefetchAsync(uintptr_t p, size_t bytes, int to, void*) {
  return prefetch(reinterpret_cast<void*>(p), bytes, to);
}

API int cudaHostAlloc(void** p, size_t bytes, unsigned) { return host_block(p, bytes, Kind::host); }
API int cudaMallocHost(void** p, size_t bytes) { return host_block(p, bytes, Kind::host); }
API int cudaFreeHost(void* p) {
  Lock hold(lock);
  wait_for_all(hold);
  return free_block(p);
}
API int cudaHostRegister(void* p, size_t bytes, unsigned) {
  Lock hold(lock);
  blocks[address(p)] = {bytes, Kind::registered, 0};
  return abi::SUCCESS;
}
API int cudaHostUnregister(void* p) {
  Lock hold(lock);
  blocks.erase(address(p));
  return abi::SUCCESS;
}

API int cudaPointerGetAttributes(abi::PointerAttributes* to, const void* p) {
  memset(to, 0, sizeof *to);
  Lock hold(lock);
  auto it = find(p);
  if (it == blocks.end()) return abi::SUCCESS;
  Kind kind = it->second.kind;
  to->type = kind == Kind::device ? abi::DEVICE : kind == Kind::managed ? abi::MANAGED : abi::HOST;
  to->device = it->second.device;
  to->device_pointer = const_cast<void*>(p);
  to->host_pointer = kind == Kind::device ? nullptr : const_cast<void*>(p);
  return abi::SUCCESS;
}
API int cuPointerGetAttribute(void* value, int which, uintptr_t p) {
  Lock hold(lock);
  auto it = find(reinterpret_cast<void*>(p));
  if (it == blocks.end()) return abi::INVALID_VALUE;
  switch (which) {
    case abi::DEVICE_POINTER: *static_cast<uintptr_t*>(value) = p; break;
    case abi::RANGE_START: *static_cast<uintptr_t*>(value) = it->first; break;
    case abi::RANGE_SIZE: *static_cast<size_t*>(value) = it->second.bytes; break;
    case abi::DEVICE_ORDINAL: *static_cast<int*>(value) = it->second.device; break;
    default: *static_cast<unsigned*>(value) = 0;
  }
  return abi::SUCCESS;
}
API int cuMemGetAddressRange_v2(uintptr_t* start, size_t* bytes, uintptr_t p) {
  Lock hold(lock);
  auto it = find(reinterpret_cast<void*>(p));
  if (it == blocks.end()) return abi::INVALID_VALUE;
  if (start) *start = it->first;
  if (bytes) *bytes = it->second.bytes;
  return abi::SUCCESS;
}

// Virtual memory, which expandable segments are made of
API int cuMemGetAllocationGranularity(size_t* n, const abi::AllocationProperties*, int) {
  *n = 2 * MIB;
  return abi::SUCCESS;
}
API int cuMemAddressReserve(uintptr_t* p, size_t bytes, size_t, uintptr_t, unsigned long long) {
  void* at = reserve_on_device(bytes);
  if (!at) return abi::OUT_OF_MEMORY;
  *p = address(at);
  Lock hold(lock);
  blocks[*p] = {bytes, Kind::device, current};
  return abi::SUCCESS;
}
API int cuMemAddressFree(uintptr_t p, size_t bytes) {
  Lock hold(lock);
  blocks.erase(p);
  munmap(reinterpret_cast<void*>(p), bytes);
  return abi::SUCCESS;
}
API int cuMemCreate(uint64_t* handle, size_t bytes, const abi::AllocationProperties* wanted, unsigned long long) {
  if (int error = standing()) return error;
  ++counts[DEVICE_ALLOCATIONS];
  Lock hold(lock);
  int on = wanted->location.id;
  if (!take(bytes, on)) return abi::OUT_OF_MEMORY;
  *handle = next_handle();
  pieces[*handle] = {bytes, Kind::device, on};
  return abi::SUCCESS;
}
API int cuMemRelease(uint64_t handle) {  // torch unmaps a piece before it releases it
  ++counts[DEVICE_FREES];
  Lock hold(lock);
  auto it = pieces.find(handle);
  if (it == pieces.end()) return abi::INVALID_VALUE;
  give(it->second.bytes, it->second.device);
  pieces.erase(it);
  return abi::SUCCESS;
}
API int cuMemMap(uintptr_t, size_t, size_t, uint64_t, unsigned long long) { return abi::SUCCESS; }
API int cuMemUnmap(uintptr_t p, size_t bytes) {
  madvise(reinterpret_cast<void*>(p), bytes, MADV_DONTNEED);
  return abi::SUCCESS;
}
API int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return abi::SUCCESS; }

// Copies: behind what is pending on their stream. What the host gives is read at once, as CUDA stages it.
static int copy(void* to, const void* from, size_t bytes, void* stream, bool host_waits) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  bool to_device = on_device(to), from_device = on_device(from);
  ++counts[to_device ? from_device ? COPIES_WITHIN : COPIES_TO_DEVICE : COPIES_TO_HOST];
  touch(to, bytes);
  Stream* on = stream_of(stream);
  submit(on);
  if (host_waits) wait(hold, {on, on->submitted});
  if (on->pending.empty()) {
    move(to, from, bytes);
  } else if (from_device) {
    run(on, [=] { move(to, from, bytes); });
  } else if (bytes <= settings().largest_copy) {
    auto staged = std::vector<char>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    run(on, [=] { move(to, staged.data(), bytes); });
  }
  return abi::SUCCESS;
}
API int cudaMemcpy(void* to, const void* from, size_t n, int) { return copy(to, from, n, nullptr, true); }
API int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void* s) { return copy(to, from, n, s, false); }
API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, void* s) { return copy(to, from, n, s, false); }
API int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                          int, void* stream) {
  for (size_t i = 0; i < height; ++i) {
    int error = copy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width, stream, false);
    if (error) return error;
  }
  return abi::SUCCESS;
}
// cuBLAS's copies; sizes are of elements.
API int cublasSetMatrixAsync(int rows, int columns, int element, const void* from, int from_rows, void* to, int to_rows, void* stream) {
  size_t n = element;
  return cudaMemcpy2DAsync(to, n * to_rows, from, n * from_rows, n * rows, columns, 0, stream);
}
API int cublasGetMatrixAsync(int rows, int columns, int element, const void* from, int from_rows, void* to, int to_rows, void* stream) {
  return cublasSetMatrixAsync(rows, columns, element, from, from_rows, to, to_rows, stream);
}
API int cublasSetVectorAsync(int count, int element, const void* from, int from_step, void* to, int to_step, void* stream) {
  return cublasSetMatrixAsync(1, count, element, from, from_step, to, to_step, stream);
}
API int cublasGetVectorAsync(int count, int element, const void* from, int from_step, void* to, int to_step, void* stream) {
  return cublasSetMatrixAsync(1, count, element, from, from_step, to, to_step, stream);
}
API int cudaMemsetAsync(void* p, int value, size_t bytes, void* stream) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  touch(p, bytes);
  Stream* on = stream_of(stream);
  submit(on);
  if (bytes <= settings().largest_copy) run(on, [=] { memset(p, value, bytes); });
  return abi::SUCCESS;
}
API int cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }
