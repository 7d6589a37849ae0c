/* Stands in front of libc (LD_PRELOAD) and writes down the calls that change files below one folder, or makes calls
 * fail: those that change or read files there, and large allocations of memory.
 *
 * Python arms it through ctypes: calls_arm() says which kind of call fails, at which count, how, and where the record
 * goes. Everything else passes through untouched. One thread at a time may arm it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { NO_FAULT = 0, SHORT_WRITE = -1 };

static char folder[PATH_MAX];    /* empty: not armed */
static char failing[32];         /* kind of call that fails, "" for none */
static long countdown;           /* the call that fails when this reaches 0 */
static int fault;                /* an errno, or SHORT_WRITE */
static int persistent;           /* calls after it fail as well */
static long fired;
static FILE* record;
static char snapshots[PATH_MAX]; /* where a synced file is copied to, "" for nowhere */
static long events;
static struct {
  char kind[32];
  long calls;
} seen[32];                      /* how many calls there were of each kind */
static int failing_memory;       /* whether that kind is "malloc" */

/* Allocations of fewer bytes never fail: Linux refuses large ones, and grants the others until it kills. */
enum { LARGE = 16384 };

#define REAL(name) ((__typeof__(&name))real(#name))
static void* real(const char* name) { return dlsym(RTLD_NEXT, name); }

void calls_disarm(void) {
  folder[0] = 0;
  failing_memory = 0;
  if (record != NULL) fclose(record);
  record = NULL;
}

void calls_arm(const char* below, const char* kind, long count, int how, int from_then_on, const char* log,
               const char* copies) {
  calls_disarm();
  snprintf(failing, sizeof failing, "%s", kind);
  countdown = count, fault = how, persistent = from_then_on, fired = 0, events = 0;
  memset(seen, 0, sizeof seen);
  snprintf(snapshots, sizeof snapshots, "%s", copies);
  if (log[0]) record = fopen(log, "w");
  snprintf(folder, sizeof folder, "%s", below);
  failing_memory = strcmp(kind, "malloc") == 0;
}

long calls_fired(void) { return fired; }

/* The place of a kind in the table; the last one is shared by those that find none. */
static long* seen_of(const char* kind) {
  const int count = sizeof seen / sizeof seen[0];
  int i = 0;
  while (i < count - 1 && seen[i].kind[0] && strcmp(seen[i].kind, kind) != 0) ++i;
  if (!seen[i].kind[0]) snprintf(seen[i].kind, sizeof seen[i].kind, "%s", kind);
  return &seen[i].calls;
}

long calls_seen(const char* kind) { return *seen_of(kind); }

static int below(const char* path) {
  return folder[0] && strncmp(path, folder, strlen(folder)) == 0;
}

/* The path of a name that may be relative to a folder. */
static const char* at(int dir, const char* name, char* room) {
  if (name[0] == '/') return name;
  char link[64];
  if (dir == AT_FDCWD) {
    if (getcwd(room, PATH_MAX / 2) == NULL) return name;
  } else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    const ssize_t n = readlink(link, room, PATH_MAX / 2);
    if (n < 0) return name;
    room[n] = 0;
  }
  const size_t n = strlen(room);
  snprintf(room + n, PATH_MAX - n, "/%s", name);
  return room;
}

static const char* of(int fd, char* room) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, room, PATH_MAX - 1);
  room[n < 0 ? 0 : n] = 0;
  return room;
}

static void note(const char* kind, const char* path, const char* other) {
  if (record == NULL) return;
  fprintf(record, "%ld\t%s\t%s\t%s\n", ++events, kind, path, other);
  fflush(record);
}

/* Whether this call is to fail. */
static int due(const char* kind) {
  __atomic_add_fetch(seen_of(kind), 1, __ATOMIC_RELAXED);
  if (strcmp(kind, failing) != 0) return NO_FAULT;
  const long left = __atomic_sub_fetch(&countdown, 1, __ATOMIC_RELAXED);
  if (left > 0 || (left < 0 && !persistent)) return NO_FAULT;
  __atomic_add_fetch(&fired, 1, __ATOMIC_RELAXED);
  return fault;
}

#define FAIL_IF_DUE(kind, value)                  \
  do {                                            \
    const int how = due(kind);                    \
    if (how > 0) {                                \
      errno = how;                                \
      return value;                               \
    }                                             \
  } while (0)

/* --- calls on descriptors ---------------------------------------------------------------------------------------- */

static ssize_t partly(const char* kind, int fd, const void* data, size_t size, off_t offset, int positioned) {
  char room[PATH_MAX];
  if (!below(of(fd, room))) return positioned ? REAL(pwrite)(fd, data, size, offset) : REAL(write)(fd, data, size);
  const int how = due(kind);
  if (how > 0) {
    errno = how;
    return -1;
  }
  if (how == SHORT_WRITE && size > 1) size /= 2;
  note(kind, room, "");
  return positioned ? REAL(pwrite)(fd, data, size, offset) : REAL(write)(fd, data, size);
}

ssize_t write(int fd, const void* data, size_t size) { return partly("write", fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return partly("write", fd, data, size, offset, 1);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  return partly("write", fd, data, size, offset, 1);
}

/* A copy of what has been synced: what a loss of power leaves at least. */
static void snapshot(int fd) {
  char name[PATH_MAX + 32], link[64], data[1 << 16];
  struct stat about;
  if (!snapshots[0] || fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) return;
  snprintf(name, sizeof name, "%s/%ld", snapshots, events);
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int in = REAL(open)(link, O_RDONLY), out = REAL(open)(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  for (ssize_t n; in >= 0 && out >= 0 && (n = REAL(read)(in, data, sizeof data)) > 0;)
    if (REAL(write)(out, data, (size_t)n) != n) abort();
  REAL(close)(in), REAL(close)(out);
}

static int synced(int fd, int (*call)(int)) {
  char room[PATH_MAX];
  if (!below(of(fd, room))) return call(fd);
  FAIL_IF_DUE("fsync", -1);
  const int result = call(fd);
  note("fsync", room, "");
  snapshot(fd);
  return result;
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

static int reserved(int fd, off64_t offset, off64_t size) {
  char room[PATH_MAX];
  if (below(of(fd, room))) {
    const int how = due("fallocate");
    if (how > 0) return how; /* returned, not set */
    note("fallocate", room, "");
  }
  return REAL(posix_fallocate64)(fd, offset, size);
}

int posix_fallocate(int fd, off_t offset, off_t size) { return reserved(fd, offset, size); }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return reserved(fd, offset, size); }

static int cut(int fd, off64_t size) {
  char room[PATH_MAX];
  if (below(of(fd, room))) {
    FAIL_IF_DUE("truncate", -1);
    note("truncate", room, "");
  }
  return REAL(ftruncate64)(fd, size);
}

int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off64_t size) { return cut(fd, size); }

/* --- calls on names ---------------------------------------------------------------------------------------------- */

static int opened(int dir, const char* name, int flags, mode_t mode) {
  char room[PATH_MAX];
  const char* path = at(dir, name, room);
  if (below(path)) {
    FAIL_IF_DUE("open", -1);
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) note(flags & O_CREAT ? "create" : "open", path, "");
  }
  return REAL(openat)(dir, name, flags, mode);
}

#define OPEN(name, first, dir)                        \
  int name first {                                    \
    va_list more;                                     \
    va_start(more, flags);                            \
    const mode_t mode = va_arg(more, mode_t);         \
    va_end(more);                                     \
    return opened(dir, path, flags, mode);            \
  }
OPEN(open, (const char* path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char* path, int flags, ...), AT_FDCWD)
OPEN(openat, (int dir, const char* path, int flags, ...), dir)
OPEN(openat64, (int dir, const char* path, int flags, ...), dir)

static int renamed(int from_dir, const char* from, int to_dir, const char* to) {
  char room[PATH_MAX], other[PATH_MAX];
  const char *source = at(from_dir, from, room), *target = at(to_dir, to, other);
  if (!below(target)) return REAL(renameat)(from_dir, from, to_dir, to);
  FAIL_IF_DUE("rename", -1);
  const int result = REAL(renameat)(from_dir, from, to_dir, to);
  if (result == 0) note("rename", source, target);
  return result;
}

int rename(const char* from, const char* to) { return renamed(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_dir, const char* from, int to_dir, const char* to) { return renamed(from_dir, from, to_dir, to); }

static int removed(int dir, const char* name, int flags) {
  char room[PATH_MAX];
  const char* path = at(dir, name, room);
  if (!below(path)) return REAL(unlinkat)(dir, name, flags);
  FAIL_IF_DUE("unlink", -1);
  const int result = REAL(unlinkat)(dir, name, flags);
  if (result == 0) note("unlink", path, "");
  return result;
}

int unlink(const char* name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int dir, const char* name, int flags) { return removed(dir, name, flags); }

int mkdir(const char* name, mode_t mode) {
  char room[PATH_MAX];
  if (below(at(AT_FDCWD, name, room))) {
    FAIL_IF_DUE("mkdir", -1);
    note("mkdir", at(AT_FDCWD, name, room), "");
  }
  return REAL(mkdir)(name, mode);
}

/* --- calls that read --------------------------------------------------------------------------------------------- */

#define FAIL_BELOW(kind, path, value)                  \
  do {                                                 \
    if (folder[0] && below(path)) FAIL_IF_DUE(kind, value); \
  } while (0)

ssize_t read(int fd, void* data, size_t size) {
  char room[PATH_MAX];
  FAIL_BELOW("read", of(fd, room), -1);
  return REAL(read)(fd, data, size);
}

ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  char room[PATH_MAX];
  FAIL_BELOW("read", of(fd, room), -1);
  return REAL(pread)(fd, data, size, offset);
}

ssize_t pread64(int fd, void* data, size_t size, off64_t offset) {
  char room[PATH_MAX];
  FAIL_BELOW("read", of(fd, room), -1);
  return REAL(pread64)(fd, data, size, offset);
}

int close(int fd) {
  char room[PATH_MAX];
  const int how = folder[0] && below(of(fd, room)) ? due("close") : NO_FAULT;
  const int result = REAL(close)(fd); /* Linux lets go of the descriptor whatever it returns */
  if (how <= 0) return result;
  errno = how;
  return -1;
}

#define STAT(name, type)                              \
  int name(const char* path, type* about) {           \
    char room[PATH_MAX];                              \
    FAIL_BELOW("stat", at(AT_FDCWD, path, room), -1); \
    return REAL(name)(path, about);                   \
  }
STAT(stat, struct stat)
STAT(stat64, struct stat64)
STAT(lstat, struct stat)
STAT(lstat64, struct stat64)

#define FSTAT(name, type)                 \
  int name(int fd, type* about) {         \
    char room[PATH_MAX];                  \
    FAIL_BELOW("stat", of(fd, room), -1); \
    return REAL(name)(fd, about);         \
  }
FSTAT(fstat, struct stat)
FSTAT(fstat64, struct stat64)

#define FSTATAT(name, type)                                         \
  int name(int dir, const char* path, type* about, int flags) {     \
    char room[PATH_MAX];                                            \
    FAIL_BELOW("stat", path[0] ? at(dir, path, room) : of(dir, room), -1); \
    return REAL(name)(dir, path, about, flags);                     \
  }
FSTATAT(fstatat, struct stat)
FSTATAT(fstatat64, struct stat64)

DIR* opendir(const char* path) {
  char room[PATH_MAX];
  FAIL_BELOW("open", at(AT_FDCWD, path, room), NULL);
  return REAL(opendir)(path);
}

#define READDIR(name, type)                            \
  type* name(DIR* dir) {                               \
    char room[PATH_MAX];                               \
    FAIL_BELOW("readdir", of(dirfd(dir), room), NULL); \
    return REAL(name)(dir);                            \
  }
READDIR(readdir, struct dirent)
READDIR(readdir64, struct dirent64)

/* What C++ streams open files with. */
#define FOPEN(name)                                   \
  FILE* name(const char* path, const char* mode) {    \
    char room[PATH_MAX];                              \
    FAIL_BELOW("open", at(AT_FDCWD, path, room), NULL); \
    return REAL(name)(path, mode);                    \
  }
FOPEN(fopen)
FOPEN(fopen64)

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* libc's own names: dlsym() allocates, and cannot be asked for them. */
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

/* Whether the dynamic loader is asking: it gets the thread-local data of a new thread so, and aborts without. */
static int by_loader(const void* caller) {
  static const char* end;
  const char* base = (const char*)_r_debug.r_ldbase;
  if (base == NULL) return 0;
  if (end == NULL) {
    const ElfW(Ehdr)* file = (const ElfW(Ehdr)*)base;
    const ElfW(Phdr)* part = (const ElfW(Phdr)*)(base + file->e_phoff);
    for (int i = 0; i < file->e_phnum; ++i)
      if (part[i].p_type == PT_LOAD && base + part[i].p_vaddr + part[i].p_memsz > end)
        end = base + part[i].p_vaddr + part[i].p_memsz;
  }
  return (const char*)caller >= base && (const char*)caller < end;
}

static int refused_to(const void* caller, size_t size) {
  return failing_memory && size >= LARGE && !by_loader(caller) && due("malloc") > 0;
}
#define refused(size) refused_to(__builtin_return_address(0), size)

void* malloc(size_t size) {
  if (!refused(size)) return __libc_malloc(size);
  errno = ENOMEM;
  return NULL;
}

void* calloc(size_t count, size_t size) {
  if (size != 0 && (count > (size_t)-1 / size || refused(count * size))) {
    errno = ENOMEM;
    return NULL;
  }
  return __libc_calloc(count, size);
}

void* realloc(void* old, size_t size) {
  if (!refused(size)) return __libc_realloc(old, size);
  errno = ENOMEM;
  return NULL;
}

void* memalign(size_t alignment, size_t size) {
  if (!refused(size)) return __libc_memalign(alignment, size);
  errno = ENOMEM;
  return NULL;
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** place, size_t alignment, size_t size) {
  void* found = memalign(alignment, size);
  if (found == NULL) return ENOMEM;
  *place = found;
  return 0;
}
