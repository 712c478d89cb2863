/* Loaded before the C library: counts the calls that reach a file system, and makes each of them slow.
 *
 * SLOW="microseconds folder": each call on the folder or on a path below it waits so long first, as on a file system that
 * is far away. 0 only counts. A call on an open file or folder belongs to the path that it was opened by. Looks at what a
 * client knows already (close, fstat, flock, seeks) are neither counted nor slow.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, STAT, LIST, MKDIR, RENAME, UNLINK, RMDIR, LINK, SYNC, READ, WRITE, KINDS };
static const char *const names[KINDS] = {"open", "stat", "list", "mkdir", "rename", "unlink", "rmdir", "link", "sync", "read", "write"};
static atomic_long counts[KINDS];

void slow_reset(void) { for (int kind = 0; kind < KINDS; kind++) counts[kind] = 0; }
/* "open 3 stat 12 ...", of all threads since the last reset. */
void slow_report(char *text, int size) {
    int used = 0;
    for (int kind = 0; kind < KINDS; kind++) used += snprintf(text + used, size - used, "%s %ld ", names[kind], counts[kind]);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void on_path(int kind, const char *path) {
    const char *slow = getenv("SLOW");
    char folder[4096];
    long microseconds;
    if (!slow || !path || sscanf(slow, "%ld %4095s", &microseconds, folder) != 2) return;
    size_t length = strlen(folder);
    if (strncmp(path, folder, length) || (path[length] && path[length] != '/')) return;
    counts[kind]++;
    struct timespec wait = {microseconds / 1000000, microseconds % 1000000 * 1000};
    if (microseconds) nanosleep(&wait, NULL);
}

static void on_file(int kind, int file, const char *below) {
    if (!getenv("SLOW") || file < 0) return;
    char link[64], path[8192];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, 4095);
    if (length < 0) return;
    snprintf(path + length, sizeof path - length, below ? "/%s" : "", below);
    on_path(kind, path);
}

static void at(int kind, int folder, const char *path) {
    if (folder == AT_FDCWD || path[0] == '/') on_path(kind, path);
    else on_file(kind, folder, path);
}

#define MODE(flags) ({ va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); mode; })
int open(const char *path, int flags, ...) { on_path(OPEN, path); return NEXT(open)(path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { on_path(OPEN, path); return NEXT(open64)(path, flags, MODE(flags)); }
int openat(int folder, const char *path, int flags, ...) { at(OPEN, folder, path); return NEXT(openat)(folder, path, flags, MODE(flags)); }
int openat64(int folder, const char *path, int flags, ...) { at(OPEN, folder, path); return NEXT(openat64)(folder, path, flags, MODE(flags)); }

int stat(const char *path, struct stat *found) { on_path(STAT, path); return NEXT(stat)(path, found); }
int stat64(const char *path, struct stat64 *found) { on_path(STAT, path); return NEXT(stat64)(path, found); }
int lstat(const char *path, struct stat *found) { on_path(STAT, path); return NEXT(lstat)(path, found); }
int lstat64(const char *path, struct stat64 *found) { on_path(STAT, path); return NEXT(lstat64)(path, found); }
int fstatat(int folder, const char *path, struct stat *found, int flags) { at(STAT, folder, path); return NEXT(fstatat)(folder, path, found, flags); }
int fstatat64(int folder, const char *path, struct stat64 *found, int flags) { at(STAT, folder, path); return NEXT(fstatat64)(folder, path, found, flags); }
int access(const char *path, int mode) { on_path(STAT, path); return NEXT(access)(path, mode); }
int faccessat(int folder, const char *path, int mode, int flags) { at(STAT, folder, path); return NEXT(faccessat)(folder, path, mode, flags); }
ssize_t readlink(const char *path, char *found, size_t size) {
    if (strncmp(path, "/proc/", 6)) on_path(STAT, path);
    return NEXT(readlink)(path, found, size);
}

DIR *opendir(const char *path) { on_path(LIST, path); return NEXT(opendir)(path); }
DIR *fdopendir(int folder) { on_file(LIST, folder, NULL); return NEXT(fdopendir)(folder); }

int mkdir(const char *path, mode_t mode) { on_path(MKDIR, path); return NEXT(mkdir)(path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { at(MKDIR, folder, path); return NEXT(mkdirat)(folder, path, mode); }
int rename(const char *from, const char *to) { on_path(RENAME, to); return NEXT(rename)(from, to); }
int renameat(int one, const char *from, int other, const char *to) { at(RENAME, other, to); return NEXT(renameat)(one, from, other, to); }
int renameat2(int one, const char *from, int other, const char *to, unsigned flags) {
    at(RENAME, other, to);
    return NEXT(renameat2)(one, from, other, to, flags);
}
int unlink(const char *path) { on_path(UNLINK, path); return NEXT(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    at(flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, path);
    return NEXT(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) { on_path(RMDIR, path); return NEXT(rmdir)(path); }
int link(const char *from, const char *to) { on_path(LINK, to); return NEXT(link)(from, to); }
int symlink(const char *from, const char *to) { on_path(LINK, to); return NEXT(symlink)(from, to); }

int fsync(int file) { on_file(SYNC, file, NULL); return NEXT(fsync)(file); }
int fdatasync(int file) { on_file(SYNC, file, NULL); return NEXT(fdatasync)(file); }
ssize_t read(int file, void *data, size_t size) { on_file(READ, file, NULL); return NEXT(read)(file, data, size); }
ssize_t pread(int file, void *data, size_t size, off_t offset) { on_file(READ, file, NULL); return NEXT(pread)(file, data, size, offset); }
ssize_t pread64(int file, void *data, size_t size, off64_t offset) { on_file(READ, file, NULL); return NEXT(pread64)(file, data, size, offset); }
ssize_t preadv(int file, const struct iovec *parts, int count, off_t offset) {
    on_file(READ, file, NULL);
    return NEXT(preadv)(file, parts, count, offset);
}
ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t offset) {
    on_file(READ, file, NULL);
    return NEXT(preadv64)(file, parts, count, offset);
}
ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    on_file(READ, file, NULL);
    return NEXT(preadv64v2)(file, parts, count, offset, flags);
}
ssize_t write(int file, const void *data, size_t size) { on_file(WRITE, file, NULL); return NEXT(write)(file, data, size); }
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    on_file(WRITE, file, NULL);
    return NEXT(pwritev)(file, parts, count, offset);
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t offset) {
    on_file(WRITE, file, NULL);
    return NEXT(pwritev64)(file, parts, count, offset);
}
