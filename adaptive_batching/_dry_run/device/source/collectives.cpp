// NCCL between processes of this machine, over shared memory. A collective is done, for the stream that it is on, when
// every rank has joined it. Messages of up to SMALL bytes carry their values; larger ones only keep the ranks in step.
#include "device.h"
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

using namespace device;

namespace {

constexpr size_t SMALL = 256 << 10;
constexpr uint64_t SLOTS = 4;  // messages that a channel holds until all have read them

// One way from a rank to one other, or to all
struct Channel {
  std::atomic<uint64_t> posted, read;  // the last messages; `read` by the one receiver, or by this rank of all others'
  uint64_t what[SLOTS];                // kind and bytes, by which ranks that disagree are found
  char data[SLOTS][SMALL];
};

struct Communicator {
  std::string name;
  int rank, size;
  Channel* channels;  // `size` to all, then size * size from one to one
  uint64_t collectives = 0, splits = 0;
  std::map<int, uint64_t> sent, received;
  bool aborted = false;

  Channel& to_all(int from) { return channels[from]; }
  Channel& to_one(int from, int to) { return channels[size + from * size + to]; }
};

thread_local std::string last_error;

// Which card each rank is on, behind the count of those that have joined
struct Beginning { std::atomic<int> joined, cards[(4096 - sizeof(int)) / sizeof(int)]; };
static_assert(sizeof(Beginning) == 4096, "");

// As NCCL does for ranks that have not chosen a card each
bool is_alone_on_its_card(Beginning& all, int rank, int size) {
  for (int other = 0; other < size && size <= int(std::size(all.cards)); ++other) {
    if (other == rank || all.cards[other] != all.cards[rank]) continue;
    char text[120];
    snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", rank, other,
             unsigned(all.cards[rank]) << 12);
    last_error = text;
    return false;
  }
  return true;
}

Communicator* join(const std::string& name, int rank, int size) {
  size_t bytes = 4096 + sizeof(Channel) * size_t(size) * (size + 1);
  std::string path = machine() ? machine() + name : name;
  int file = machine() ? open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600) : shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, off_t(bytes))) return nullptr;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return nullptr;
  auto& beginning = *static_cast<Beginning*>(at);
  if (size <= int(std::size(beginning.cards))) beginning.cards[rank] = card_of(current) + 1;
  if (++beginning.joined == size) machine() ? unlink(path.c_str()) : shm_unlink(path.c_str());  // all have it mapped
  while (beginning.joined < size) usleep(200);
  if (!is_alone_on_its_card(beginning, rank, size)) return nullptr;
  return new Communicator{name, rank, size, reinterpret_cast<Channel*>(static_cast<char*>(at) + 4096)};
}

size_t width(int type) {
  switch (type) {
    case abi::NCCL_INT32: case abi::NCCL_UINT32: case abi::NCCL_FLOAT32: return 4;
    case abi::NCCL_INT64: case abi::NCCL_UINT64: case abi::NCCL_FLOAT64: return 8;
    case abi::NCCL_FLOAT16: case abi::NCCL_BFLOAT16: return 2;
    default: return 1;
  }
}

float of_bfloat16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::map<int, double> scales;  // of reductions that torch makes

template <class T, class Get, class Put>
void reduce_as(char* to, const std::vector<const char*>& from, size_t n, int how, Get get, Put put) {
  for (size_t i = 0; i < n; ++i) {
    auto value = get(reinterpret_cast<const T*>(from[0])[i]);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      auto next = get(reinterpret_cast<const T*>(from[rank])[i]);
      value = how == abi::NCCL_PROD ? value * next : how == abi::NCCL_MAX ? (next > value ? next : value)
              : how == abi::NCCL_MIN ? (next < value ? next : value) : value + next;
    }
    using Value = decltype(value);
    if (how == abi::NCCL_AVG) value = Value(value / Value(from.size()));
    if (how >= abi::NCCL_FIRST_CUSTOM) value = Value(double(value) * scales[how]);
    reinterpret_cast<T*>(to)[i] = put(value);
  }
}
template <class T> void reduce_plain(char* to, const std::vector<const char*>& from, size_t n, int how) {
  reduce_as<T>(to, from, n, how, [](T x) { return x; }, [](T x) { return x; });
}
void reduce(char* to, const std::vector<const char*>& from, size_t n, int type, int how) {
  switch (type) {
    case abi::NCCL_INT8: return reduce_plain<int8_t>(to, from, n, how);
    case abi::NCCL_UINT8: return reduce_plain<uint8_t>(to, from, n, how);
    case abi::NCCL_INT32: return reduce_plain<int32_t>(to, from, n, how);
    case abi::NCCL_UINT32: return reduce_plain<uint32_t>(to, from, n, how);
    case abi::NCCL_INT64: return reduce_plain<int64_t>(to, from, n, how);
    case abi::NCCL_UINT64: return reduce_plain<uint64_t>(to, from, n, how);
    case abi::NCCL_FLOAT32: return reduce_plain<float>(to, from, n, how);
    case abi::NCCL_FLOAT64: return reduce_plain<double>(to, from, n, how);
    case abi::NCCL_BFLOAT16: return reduce_as<uint16_t>(to, from, n, how, of_bfloat16, to_bfloat16);
    default: memset(to, 0, n * width(type));  // half precision and float8: of no count that ranks agree on
  }
}

// A collective in two parts: this rank's message is posted when there is room, and what all have posted is read. Both go
// in the order of the calls, whatever the streams.
struct Collective {
  Communicator* comm;
  char kind;
  const void* from;
  size_t bytes;  // of this rank's message
  std::function<void(const std::vector<const char*>&)> finish;
  uint64_t number = 0;
  bool posted = false, never = false, said = false;

  bool advance() {
    if (comm->aborted) return true;
    if (never) return false;
    uint64_t slot = number % SLOTS, what = uint64_t(kind) << 56 ^ bytes;
    Channel& own = comm->to_all(comm->rank);
    if (!posted) {
      if (own.posted + 1 != number) return false;
      for (int rank = 0; rank < comm->size; ++rank) {
        if (comm->to_all(rank).read + SLOTS < number) return false;
      }
      own.what[slot] = what;
      if (from && bytes <= SMALL) memcpy(own.data[slot], from, bytes);
      own.posted = number;
      posted = true;
    }
    if (own.read + 1 != number) return false;
    std::vector<const char*> messages;
    for (int rank = 0; rank < comm->size; ++rank) {
      Channel& other = comm->to_all(rank);
      if (other.posted < number) return false;
      if (other.what[slot] != what) {
        if (!said) {
          fprintf(stderr, "emulated device: collective %ld: rank %d has kind %c of %zu bytes, rank %d another\n", long(number),
                  comm->rank, kind, bytes, rank);
        }
        said = true;
        return false;
      }
      messages.push_back(other.data[slot]);
    }
    if (bytes <= SMALL && finish) finish(messages);
    own.read = number;
    return true;
  }
};

// Sends and receives of a group make progress each for itself.
struct Transfer {
  Communicator* comm;
  int peer;
  bool sends;
  char* at;
  size_t bytes;
  uint64_t number = 0;
  bool done = false;

  void advance() {
    Channel& channel = sends ? comm->to_one(comm->rank, peer) : comm->to_one(peer, comm->rank);
    uint64_t slot = number % SLOTS;
    if (sends && channel.posted + 1 == number && channel.read + SLOTS >= number) {
      if (bytes <= SMALL) memcpy(channel.data[slot], at, bytes);
      channel.posted = number;
      done = true;
    } else if (!sends && channel.read + 1 == number && channel.posted >= number) {
      if (bytes <= SMALL) memcpy(at, channel.data[slot], bytes);
      channel.read = number;
      done = true;
    }
  }
};

int enqueue(Collective op, void* stream) {
  if (standing()) return abi::NCCL_UNHANDLED_CUDA_ERROR;
  ++counts[COLLECTIVES];
  Lock hold(lock);
  op.number = ++op.comm->collectives;
  op.never = faults.collectives_before >= 0 && faults.collectives_before-- == 0;
  auto shared = std::make_shared<Collective>(std::move(op));
  Stream* on = stream_of(stream);
  submit(on);
  run_until(on, [shared] { return shared->advance(); });
  return abi::NCCL_SUCCESS;
}

Communicator* of(void* comm) { return static_cast<Communicator*>(comm); }
char* bytes_of(void* p) { return static_cast<char*>(p); }
const char* bytes_of(const void* p) { return static_cast<const char*>(p); }

thread_local int depth = 0;
thread_local std::vector<std::pair<Transfer, void*>> group;

int end_group() {
  std::map<void*, std::vector<Transfer>> by_stream;
  for (auto& [transfer, stream] : group) by_stream[stream].push_back(transfer);
  group.clear();
  for (auto& [stream, transfers] : by_stream) {
    ++counts[COLLECTIVES];
    Lock hold(lock);
    for (Transfer& t : transfers) t.number = t.sends ? ++t.comm->sent[t.peer] : ++t.comm->received[t.peer];
    auto shared = std::make_shared<std::vector<Transfer>>(std::move(transfers));
    Stream* on = stream_of(stream);
    submit(on);
    run_until(on, [shared] {
      bool all = true;
      for (Transfer& t : *shared) {
        if (!t.done && !t.comm->aborted) t.advance();
        all = all && (t.done || t.comm->aborted);
      }
      return all;
    });
  }
  return abi::NCCL_SUCCESS;
}
int transfer(void* comm, int peer, bool sends, void* at, size_t bytes, void* stream) {
  group.push_back({{of(comm), peer, sends, bytes_of(at), bytes}, stream});
  return depth ? abi::NCCL_SUCCESS : end_group();
}

}  // namespace

API int ncclAllGather(const void* from, void* to, size_t n, int type, void* comm, void* stream) {
  size_t bytes = n * width(type);
  return enqueue({of(comm), 'g', from, bytes, [=](const std::vector<const char*>& all) {
    for (size_t rank = 0; rank < all.size(); ++rank) memcpy(bytes_of(to) + rank * bytes, all[rank], bytes);
  }}, stream);
}
API int ncclReduceScatter(const void* from, void* to, size_t n, int type, int how, void* comm, void* stream) {
  size_t each = n * width(type), rank = size_t(of(comm)->rank);
  return enqueue({of(comm), 's', from, each * of(comm)->size, [=](std::vector<const char*> all) {
    for (auto& message : all) message += rank * each;
    reduce(bytes_of(to), all, n, type, how);
  }}, stream);
}
API int ncclAllReduce(const void* from, void* to, size_t n, int type, int how, void* comm, void* stream) {
  return enqueue({of(comm), 'r', from, n * width(type), [=](const std::vector<const char*>& all) {
    reduce(bytes_of(to), all, n, type, how);
  }}, stream);
}
API int ncclReduce(const void* from, void* to, size_t n, int type, int how, int root, void* comm, void* stream) {
  bool own = of(comm)->rank == root;
  return enqueue({of(comm), 'o', from, n * width(type), [=](const std::vector<const char*>& all) {
    if (own) reduce(bytes_of(to), all, n, type, how);
  }}, stream);
}
API int ncclBroadcast(const void* from, void* to, size_t n, int type, int root, void* comm, void* stream) {
  bool own = of(comm)->rank == root;
  size_t bytes = n * width(type);
  return enqueue({of(comm), 'b', own ? from : nullptr, bytes, [=](const std::vector<const char*>& all) {
    memcpy(to, all[root], bytes);
  }}, stream);
}
API int ncclBcast(void* at, size_t n, int type, int root, void* comm, void* stream) { return ncclBroadcast(at, at, n, type, root, comm, stream); }
API int ncclSend(const void* from, size_t n, int type, int peer, void* comm, void* stream) {
  return transfer(comm, peer, true, const_cast<void*>(from), n * width(type), stream);
}
API int ncclRecv(void* to, size_t n, int type, int peer, void* comm, void* stream) {
  return transfer(comm, peer, false, to, n * width(type), stream);
}
API int ncclAlltoAll(const void* from, void* to, size_t n, int type, void* comm, void* stream) {
  size_t bytes = n * width(type);
  ++depth;
  for (int peer = 0; peer < of(comm)->size; ++peer) {
    transfer(comm, peer, true, const_cast<char*>(bytes_of(from)) + peer * bytes, bytes, stream);
    transfer(comm, peer, false, bytes_of(to) + peer * bytes, bytes, stream);
  }
  return --depth ? abi::NCCL_SUCCESS : end_group();
}
API int ncclGroupStart() { ++depth; return abi::NCCL_SUCCESS; }
API int ncclGroupEnd() { return --depth ? abi::NCCL_SUCCESS : end_group(); }

API int ncclGetVersion(int* version) { *version = 22700; return abi::NCCL_SUCCESS; }
API const char* ncclGetErrorString(int error) {
  return error == abi::NCCL_INVALID_USAGE ? "invalid usage" : error ? "unhandled cuda error (emulated device)" : "no error";
}
API const char* ncclGetLastError(void*) { return last_error.c_str(); }
API int ncclGetUniqueId(abi::NcclId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/emulated-nccl-%d-%lx", int(getpid()), long(next_handle()) ^ long(time(nullptr)) << 16);
  return abi::NCCL_SUCCESS;
}
API int ncclCommInitRank(void** comm, int size, abi::NcclId id, int rank) {
  *comm = join(id.internal, rank, size);
  return *comm ? abi::NCCL_SUCCESS : abi::NCCL_INVALID_USAGE;
}
API int ncclCommInitRankConfig(void** comm, int size, abi::NcclId id, int rank, void*) { return ncclCommInitRank(comm, size, id, rank); }
API int ncclCommInitRankScalable(void** comm, int size, int rank, int, abi::NcclId* ids, void*) { return ncclCommInitRank(comm, size, ids[0], rank); }
API int ncclCommSplit(void* from, int color, int key, void** to, void*) {
  Communicator* parent = of(from);
  struct Place { int color, key; } own = {color, key};
  auto places = std::make_shared<std::vector<Place>>();
  Collective exchange{parent, 'p', &own, sizeof own, [places](const std::vector<const char*>& all) {
    for (const char* message : all) places->push_back(*reinterpret_cast<const Place*>(message));
  }};
  {
    Lock hold(lock);
    exchange.number = ++parent->collectives;
    ++parent->splits;
  }
  while (!exchange.advance()) usleep(200);
  *to = nullptr;
  if (color < 0) return abi::NCCL_SUCCESS;  // NCCL_SPLIT_NOCOLOR
  int rank = 0, size = 0;
  for (int other = 0; other < parent->size; ++other) {
    const Place& place = (*places)[other];
    if (place.color != color) continue;
    ++size;
    if (place.key < key || (place.key == key && other < parent->rank)) ++rank;
  }
  *to = join(parent->name + "-" + std::to_string(parent->splits) + "-" + std::to_string(color), rank, size);
  return *to ? abi::NCCL_SUCCESS : abi::NCCL_INVALID_USAGE;
}
API int ncclCommAbort(void* comm) {
  if (!comm) return abi::NCCL_SUCCESS;  // of a group whose first collective never came
  Lock hold(lock);
  of(comm)->aborted = true;
  changed.notify_all();
  return abi::NCCL_SUCCESS;
}
API int ncclCommGetAsyncError(void*, int* error) { *error = standing() ? abi::NCCL_UNHANDLED_CUDA_ERROR : abi::NCCL_SUCCESS; return abi::NCCL_SUCCESS; }
API int ncclCommCount(void* comm, int* n) { *n = of(comm)->size; return abi::NCCL_SUCCESS; }
API int ncclCommUserRank(void* comm, int* rank) { *rank = of(comm)->rank; return abi::NCCL_SUCCESS; }
API int ncclCommFinalize(void*) { return abi::NCCL_SUCCESS; }
API int ncclCommDestroy(void*) { return abi::NCCL_SUCCESS; }
API int ncclCommRegister(void*, void*, size_t, void** handle) { *handle = nullptr; return abi::NCCL_SUCCESS; }
API int ncclCommDeregister(void*, void*) { return abi::NCCL_SUCCESS; }
API int ncclRedOpCreatePreMulSum(int* how, void* scalar, int type, int, void*) {
  Lock hold(lock);
  double value = type == abi::NCCL_FLOAT64 ? *static_cast<double*>(scalar)
                 : type == abi::NCCL_BFLOAT16 ? of_bfloat16(*static_cast<uint16_t*>(scalar)) : *static_cast<float*>(scalar);
  scales[*how = abi::NCCL_FIRST_CUSTOM + int(scales.size())] = value;
  return abi::NCCL_SUCCESS;
}
API int ncclRedOpDestroy(int, void*) { return abi::NCCL_SUCCESS; }
extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);
API int ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? abi::NCCL_UNHANDLED_CUDA_ERROR : abi::NCCL_SUCCESS; }
API int ncclMemFree(void* p) { cudaFree(p); return abi::NCCL_SUCCESS; }
