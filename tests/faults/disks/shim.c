/* Loaded before the C library: makes system calls fail, or do half of what they are asked, on files whose path ends as
 * told.
 *
 * FAULT="call errno at times suffix": the next `times` calls that touch a byte from `at` on fail with errno, or, with
 * errno 0, do half of it. "pread_sectors" with errno 0 reads sectors that do not fill their last page. "pwritev_direct"
 * is a pwritev of a file opened with O_DIRECT, "open_direct" its opening.
 * CLOCK_JUMPS: the time of day jumps by years at every look at it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_int hits;

int fault_hits(void) { return atomic_exchange(&hits, 0); }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum { PASS, HALF, FAIL };

static int fault_of_path(const char *call, const char *path, long end) {
    const char *fault = getenv("FAULT");
    char name[32], suffix[512];
    int number, times;
    long at;
    if (!fault || sscanf(fault, "%31s %d %ld %d %511s", name, &number, &at, &times, suffix) != 5) return PASS;
    size_t length = strlen(path), wanted = strlen(suffix);
    if (strcmp(name, call) || length < wanted || strcmp(path + length - wanted, suffix) || end <= at) return PASS;
    if (atomic_fetch_add(&hits, 1) >= times) return PASS;
    errno = number;
    return number ? FAIL : HALF;
}

static int fault_of(const char *call, int file, long end) {
    if (!getenv("FAULT")) return PASS;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return PASS;
    path[length] = 0;
    return fault_of_path(call, path, end);
}

static size_t half(size_t nbytes) { return nbytes > 8192 ? nbytes / 2 / 4096 * 4096 : (nbytes + 1) / 2; }

static ssize_t faulty_pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    size_t nbytes = 0;
    for (int i = 0; i < count; i++) nbytes += parts[i].iov_len;
    int fault = fault_of("pwritev", file, offset + nbytes);
    if (!fault && fcntl(file, F_GETFL) & O_DIRECT) fault = fault_of("pwritev_direct", file, offset + nbytes);
    if (fault == FAIL) return -1;
    if (fault == HALF) return NEXT(pwrite)(file, parts[0].iov_base, half(parts[0].iov_len), offset);
    return NEXT(pwritev)(file, parts, count, offset);
}
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    return faulty_pwritev(file, parts, count, offset);
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t offset) {
    return faulty_pwritev(file, parts, count, offset);
}

static ssize_t faulty_pread(int file, void *data, size_t nbytes, off_t offset) {
    int fault = fault_of("pread", file, offset + nbytes);
    if (fault == FAIL) return -1;
    int sectors = fault_of("pread_sectors", file, offset + nbytes);
    if (sectors == HALF && nbytes > 2048) return NEXT(pread)(file, data, half(nbytes) - 512, offset);
    return NEXT(pread)(file, data, fault == HALF ? half(nbytes) : nbytes, offset);
}
ssize_t pread(int file, void *data, size_t nbytes, off_t offset) { return faulty_pread(file, data, nbytes, offset); }
ssize_t pread64(int file, void *data, size_t nbytes, off64_t offset) { return faulty_pread(file, data, nbytes, offset); }

ssize_t write(int file, const void *data, size_t nbytes) {
    int fault = PASS;
    if (getenv("FAULT")) fault = fault_of("write", file, lseek(file, 0, SEEK_CUR) + nbytes);
    if (fault == FAIL) return -1;
    return NEXT(write)(file, data, fault == HALF ? half(nbytes) : nbytes);
}

int fsync(int file) { return fault_of("fsync", file, 1) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return fault_of("fdatasync", file, 1) ? -1 : NEXT(fdatasync)(file); }
int ftruncate(int file, off_t size) { return fault_of("ftruncate", file, 1) ? -1 : NEXT(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { return fault_of("ftruncate", file, 1) ? -1 : NEXT(ftruncate)(file, size); }
int fallocate(int file, int mode, off_t at, off_t n) {
    return fault_of("fallocate", file, 1) ? -1 : NEXT(fallocate)(file, mode, at, n);
}
int fallocate64(int file, int mode, off64_t at, off64_t n) {
    return fault_of("fallocate", file, 1) ? -1 : NEXT(fallocate)(file, mode, at, n);
}
int rename(const char *from, const char *to) { return fault_of_path("rename", to, 1) ? -1 : NEXT(rename)(from, to); }

static int faulty_open(const char *path, int flags, mode_t mode) {
    if (flags & O_DIRECT && fault_of_path("open_direct", path, 1)) return -1;
    if (flags & O_CREAT && fault_of_path("open", path, 1)) return -1;
    return NEXT(open)(path, flags, mode);
}
#define MODE(flags) ({ va_list rest; va_start(rest, flags); mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; va_end(rest); mode; })
int open(const char *path, int flags, ...) { return faulty_open(path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return faulty_open(path, flags, MODE(flags)); }

static time_t jump(void) {
    static atomic_uint calls;
    if (!getenv("CLOCK_JUMPS")) return 0;
    return (atomic_fetch_add(&calls, 1) % 2 ? 1 : -1) * 10L * 365 * 24 * 3600;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = NEXT(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    int status = NEXT(gettimeofday)(now, zone);
    now->tv_sec += jump();
    return status;
}
time_t time(time_t *now) {
    time_t found = NEXT(time)(NULL) + jump();
    if (now) *now = found;
    return found;
}
