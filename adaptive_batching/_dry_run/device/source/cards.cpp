// The cards of the machine: which of them this process sees, and what the processes that share them have taken.
#include "device.h"
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <string>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace device;

namespace {

constexpr int PROCESSES = 256;

// A file that all processes of a machine have mapped; new pages of it are zeros
struct Taken {
  size_t most[MAX_DEVICES];  // of each card, by all processes together
  struct { int process; size_t bytes[MAX_DEVICES]; } of[PROCESSES];
};
Taken* taken = nullptr;
int file = -1, own = -1, owner = 0;  // the place of this process, which a fork of it has not

// A process that has ended, or waits for its parent to look at it, holds nothing.
bool is_there(int process) {
  char path[32], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  int stat = open(path, O_RDONLY | O_CLOEXEC);
  if (stat < 0) return false;
  ssize_t n = read(stat, text, sizeof text - 1);
  close(stat);
  text[n > 0 ? n : 0] = 0;
  const char* name_ends = strrchr(text, ')');
  return name_ends && name_ends[1] && name_ends[2] != 'Z' && name_ends[2] != 'X';
}

void open_file() {
  const char* folder = machine();
  if (!folder || owner == getpid()) return;
  owner = getpid();
  own = -1;
  file = open((std::string(folder) + "/cards").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Taken))) return;
  void* at = mmap(nullptr, sizeof(Taken), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  taken = at == MAP_FAILED ? nullptr : static_cast<Taken*>(at);
}

void find_place() {
  for (int i = 0; i < PROCESSES && own < 0; ++i) {
    if (taken->of[i].process && is_there(taken->of[i].process)) continue;
    memset(&taken->of[i], 0, sizeof taken->of[i]);
    taken->of[i].process = owner;
    own = i;
  }
}

const std::vector<int>& visible() {
  static const std::vector<int> cards = [] {
    std::vector<int> all, chosen;
    for (int card = 0; card < settings().count; ++card) all.push_back(card);
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return all;
    bool is_known = true;
    for (const char* at = text; *at;) {
      const char* comma = strchr(at, ',');
      std::string one(at, comma ? size_t(comma - at) : strlen(at));
      if (!one.compare(0, 4, "GPU-")) one = one.substr(one.rfind('-') + 1);  // its identifier ends with its number
      char* end;
      long card = strtol(one.c_str(), &end, 10);
      if (end == one.c_str() || card < 0) break;  // CUDA stops at the first that is none
      is_known = is_known && card < settings().count;
      chosen.push_back(int(card));
      if (!comma) break;
      at = comma + 1;
    }
    // A script that names cards of another machine, such as the fourth of eight, gets as many of those that are here.
    if (!is_known) for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = int(i) % settings().count;
    if (chosen.size() > size_t(settings().count)) chosen.resize(size_t(settings().count));
    return chosen;
  }();
  return cards;
}

}  // namespace

namespace device {

const char* machine() {
  static const char* folder = getenv("EMULATED_DEVICE_MACHINE");
  return folder && *folder ? folder : nullptr;
}

int visible_cards() { return int(visible().size()); }
int card_of(int device) { return device >= 0 && device < visible_cards() ? visible()[size_t(device)] : device; }

Shared::Shared() {
  open_file();
  if (taken) while (flock(file, LOCK_EX) && errno == EINTR) {}
}
Shared::~Shared() { if (taken) flock(file, LOCK_UN); }

size_t taken_by_others(int device) {
  size_t sum = 0;
  if (taken) {
    for (int i = 0; i < PROCESSES; ++i) {
      auto& other = taken->of[i];
      if (i != own && other.process && other.bytes[card_of(device)] && is_there(other.process)) {
        sum += other.bytes[card_of(device)];
      }
    }
  }
  return sum;
}

void tell_others(size_t bytes, int device) {
  if (!taken) return;
  if (own < 0) find_place();
  if (own < 0) return;
  int card = card_of(device);
  taken->of[own].bytes[card] = bytes;
  size_t all = bytes + taken_by_others(device);
  if (all > taken->most[card]) taken->most[card] = all;
}

}  // namespace device

// The most that all processes together have taken of the card behind a device; 0 where they have the cards to themselves.
API size_t emulated_most_taken(int device) {
  Lock hold(lock);
  Shared cards;
  return taken ? taken->most[card_of(device)] : 0;
}
API int emulated_card(int device) { return card_of(device); }
// Cards for tools that look past CUDA_VISIBLE_DEVICES, as torch does to count them: as many as it takes to have those named
API int emulated_cards() {
  int most = settings().count, named = 0;
  const char* at = getenv("CUDA_VISIBLE_DEVICES");
  for (; at && *at && named < settings().count; ++named) {
    long card = strtol(at, nullptr, 10);
    if (card >= most && card < 1024) most = int(card) + 1;
    const char* comma = strchr(at, ',');
    at = comma ? comma + 1 : nullptr;
  }
  return most;
}
API size_t emulated_taken_of_card(int card) {
  Lock hold(lock);
  Shared cards;
  size_t sum = 0;
  if (taken) for (auto& one : taken->of) if (one.process && is_there(one.process)) sum += one.bytes[card < MAX_DEVICES ? card : 0];
  return sum;
}
