// Keeps files that were there before a dry run began from being overwritten, moved or removed by the script. What is new may be
// changed at will. Each is refused as on a file system that can only be read, and named in the folder of the machine.
#include "device.h"
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

// The functions that these stand in front of, found when the library is loaded: later there may be a lock in the way, as
// between fork and exec.
struct Functions {
  int (*openat)(int, const char*, int, ...);
  FILE* (*fopen)(const char*, const char*);
  int (*truncate)(const char*, off_t);
  int (*unlink)(const char*);
  int (*remove)(const char*);
  int (*unlinkat)(int, const char*, int);
  int (*rename)(const char*, const char*);
  int (*renameat)(int, const char*, int, const char*);
  int (*renameat2)(int, const char*, int, const char*, unsigned);
};
template <class Function> void find(Function& function, const char* name) { function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name)); }
const Functions& real() {
  static const Functions all = [] {
    Functions found;
    find(found.openat, "openat64");  // as is openat where this library runs, on 64 bits
    find(found.fopen, "fopen64");
    find(found.truncate, "truncate64");
    find(found.unlink, "unlink");
    find(found.remove, "remove");
    find(found.unlinkat, "unlinkat");
    find(found.rename, "rename");
    find(found.renameat, "renameat");
    find(found.renameat2, "renameat2");
    return found;
  }();
  return all;
}
__attribute__((constructor)) void find_all() { real(); }

double begun() {  // seconds since 1970; 0 where nothing is kept
  static const double seconds = getenv("EMULATED_DEVICE_KEEPS_BEFORE") ? atof(getenv("EMULATED_DEVICE_KEEPS_BEFORE")) : 0;
  return seconds;
}

std::string absolute(int folder, const char* path) {
  if (*path == '/') return path;
  char link[32], at[4096];
  snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
  ssize_t n = readlink(link, at, sizeof at - 1);
  return std::string(at, n > 0 ? size_t(n) : 0) + "/" + path;
}

// Caches, and what tools keep for themselves
bool is_cache(const std::string& path) {
  static const std::string work = absolute(AT_FDCWD, "");
  size_t from = path.compare(0, work.size(), work) ? 0 : work.size() - 1;
  if (path.find("/__pycache__/", from) != std::string::npos) return true;
  for (size_t at = path.find("/.", from); at != std::string::npos; at = path.find("/.", at + 1)) {
    if (path.compare(at, 3, "/./") && path.compare(at, 4, "/../")) return true;
  }
  for (char** variable = environ; *variable; ++variable) {  // such as HF_HOME and TRITON_CACHE_DIR
    const char* is = strchr(*variable, '=');
    std::string name(*variable, is ? size_t(is - *variable) : 0);
    bool is_of_cache = name.find("CACHE") != std::string::npos || name == "HF_HOME" || name == "TORCH_HOME";
    if (is_of_cache && is[1] == '/' && !path.compare(0, strlen(is + 1), is + 1)) return true;
  }
  return false;
}

// True for a file with something in it, or a link, that is as it was when the dry run began
bool keeps(int folder, const char* path, int follows = AT_SYMLINK_NOFOLLOW) {
  struct stat found;
  if (!begun() || !path || fstatat(folder, path, &found, follows) || !found.st_size) return false;
  if (!S_ISREG(found.st_mode) && !S_ISLNK(found.st_mode)) return false;
  if (double(found.st_ctim.tv_sec) + 1e-9 * double(found.st_ctim.tv_nsec) >= begun()) return false;
  std::string name = absolute(folder, path);
  if (is_cache(name)) return false;
  if (const char* machine = device::machine()) {
    std::string file = std::string(machine) + "/kept";
    int list = real().openat(AT_FDCWD, file.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (list >= 0) {
      name += '\n';
      if (write(list, name.data(), name.size()) < 0) {}
      close(list);
    }
  }
  errno = EROFS;
  return true;
}

int opened(int folder, const char* path, int flags, mode_t mode) {
  return (flags & O_TRUNC) && keeps(folder, path, 0) ? -1 : real().openat(folder, path, flags, mode);
}
FILE* opened(const char* path, const char* mode) {
  return *mode == 'w' && keeps(AT_FDCWD, path, 0) ? nullptr : real().fopen(path, mode);
}
int shortened(const char* path, off_t n) { return keeps(AT_FDCWD, path, 0) ? -1 : real().truncate(path, n); }

}  // namespace

#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list given; va_start(given, flags); mode = va_arg(given, mode_t); va_end(given); }
API int open(const char* path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
API int open64(const char* path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
API int openat(int folder, const char* path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
API int openat64(int folder, const char* path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
API int creat(const char* path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
API int creat64(const char* path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
API FILE* fopen(const char* path, const char* mode) { return opened(path, mode); }
API FILE* fopen64(const char* path, const char* mode) { return opened(path, mode); }
API int truncate(const char* path, off_t n) { return shortened(path, n); }
API int truncate64(const char* path, off64_t n) { return shortened(path, n); }
API int unlink(const char* path) { return keeps(AT_FDCWD, path) ? -1 : real().unlink(path); }
API int remove(const char* path) { return keeps(AT_FDCWD, path) ? -1 : real().remove(path); }
API int unlinkat(int folder, const char* path, int flags) { return keeps(folder, path) ? -1 : real().unlinkat(folder, path, flags); }
API int rename(const char* from, const char* to) {
  return keeps(AT_FDCWD, from) || keeps(AT_FDCWD, to) ? -1 : real().rename(from, to);
}
API int renameat(int folder, const char* from, int into, const char* to) {
  return keeps(folder, from) || keeps(into, to) ? -1 : real().renameat(folder, from, into, to);
}
API int renameat2(int folder, const char* from, int into, const char* to, unsigned flags) {
  return keeps(folder, from) || keeps(into, to) ? -1 : real().renameat2(folder, from, into, to, flags);
}
