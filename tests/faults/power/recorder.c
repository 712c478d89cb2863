/* Loaded before the C library: records every call that changes files below a folder, with all bytes that are written.
 *
 * RECORD_FOLDER: the folder, as an absolute path without links. RECORD_LOG: the file that the records are added to.
 * Each record is a `struct record`, then `path`, `other` and the bytes. A lock is held during each call and the
 * writing of its record, over all threads and processes, so the records are in the order in which the calls took place.
 * power_mark(text) adds a text of the caller's to the log. A call that cannot be recorded ends the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MARK, MAKE_FILE, MAKE_FOLDER, WRITE, LENGTH, SYNC, RENAME, EXCHANGE, LINK, SYMLINK, UNLINK, REMOVE_FOLDER };

struct record {
    uint32_t kind, path_bytes, other_bytes, thread;
    int64_t inode, offset, nbytes; /* WRITE: where and how much. LENGTH: offset is the new length. */
};

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_file = -1;
static pid_t log_process;

static void give_up(const char *why) {
    dprintf(2, "recorder: %s\n", why);
    _exit(99);
}

static void acquire(void) {
    pthread_mutex_lock(&mutex);
    if (log_process != getpid()) { /* a fork shares the lock of an open file with its parent */
        const char *path = getenv("RECORD_LOG");
        if (!path) give_up("RECORD_LOG is missing");
        log_file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
        if (log_file < 0) give_up("the log cannot be opened");
        log_process = getpid();
    }
    while (flock(log_file, LOCK_EX) != 0)
        if (errno != EINTR) give_up("the log cannot be locked");
}

static void release(void) {
    int saved = errno;
    flock(log_file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

static void put(const void *data, size_t nbytes) {
    const char *at = data;
    while (nbytes) {
        long done = syscall(SYS_write, log_file, at, nbytes);
        if (done <= 0) give_up("the log cannot be written");
        at += done;
        nbytes -= done;
    }
}

static void add(uint32_t kind, const char *path, const char *other, int64_t inode, int64_t offset, const void *data,
                int64_t nbytes) {
    int saved = errno;
    struct record head = {.kind = kind,
                          .path_bytes = path ? strlen(path) : 0,
                          .other_bytes = other ? strlen(other) : 0,
                          .thread = syscall(SYS_gettid),
                          .inode = inode,
                          .offset = offset,
                          .nbytes = nbytes};
    put(&head, sizeof head);
    if (path) put(path, head.path_bytes);
    if (other) put(other, head.other_bytes);
    if (data) put(data, nbytes);
    errno = saved;
}

void power_mark(const char *text) {
    acquire();
    add(MARK, NULL, NULL, 0, 0, text, strlen(text));
    release();
}

/* -- which files ----------------------------------------------------------------------------------------------- */

static const char *folder(void) {
    static const char *found;
    if (!found) found = getenv("RECORD_FOLDER");
    return found;
}

static int is_below(const char *path) {
    size_t length = strlen(folder());
    return !strncmp(path, folder(), length) && (path[length] == '/' || !path[length]);
}

/* Writes the absolute path of a name to `full`, with the links of its parent resolved. False if it is elsewhere. */
static int resolve(int at, const char *path, char *full) {
    if (!folder()) return 0;
    char joined[2 * PATH_MAX], parent[PATH_MAX];
    if (path[0] == '/') {
        snprintf(joined, sizeof joined, "%s", path);
    } else {
        char base[PATH_MAX], link[64];
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        snprintf(joined, sizeof joined, "%s/%s", base, path);
    }
    size_t length = strlen(joined);
    while (length > 1 && joined[length - 1] == '/') joined[--length] = 0;
    char *slash = strrchr(joined, '/');
    if (!slash) return 0;
    char name[NAME_MAX + 2];
    if (strlen(slash + 1) > NAME_MAX) return 0;
    strcpy(name, slash + 1);
    *(slash == joined ? slash + 1 : slash) = 0;
    if (!realpath(joined, parent)) return 0;
    snprintf(full, PATH_MAX, "%s/%s", parent, name);
    return is_below(full);
}

/* The inode of an open file or folder below the folder, else 0. */
static int64_t recorded(int file, mode_t *mode) {
    if (!folder()) return 0;
    int saved = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    struct stat status;
    int64_t inode = 0;
    if (length > 0) {
        path[length] = 0;
        if (is_below(path) && fstat(file, &status) == 0) {
            inode = status.st_ino;
            if (mode) *mode = status.st_mode;
        }
    }
    errno = saved;
    return inode;
}

static int64_t inode_of(int at, const char *path) {
    struct stat status;
    return fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
}

/* -- files ----------------------------------------------------------------------------------------------------- */

static int recorded_open(int at, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC);
    if (!changes || !resolve(at, path, full)) return NEXT(openat)(at, path, flags, mode);
    acquire();
    int is_new = !inode_of(AT_FDCWD, full);
    int file = NEXT(openat)(at, path, flags, mode);
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode)) {
        if (flags & O_SYNC || flags & O_DSYNC) give_up("files opened with O_SYNC are not modelled");
        if (is_new) add(MAKE_FILE, full, NULL, status.st_ino, 0, NULL, 0);
        else if (flags & O_TRUNC) add(LENGTH, full, NULL, status.st_ino, 0, NULL, 0);
    }
    release();
    return file;
}
#define MODE(flags) ({ va_list rest; va_start(rest, flags); mode_t m = flags & O_CREAT ? va_arg(rest, mode_t) : 0; va_end(rest); m; })
int open(const char *path, int flags, ...) { return recorded_open(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return recorded_open(AT_FDCWD, path, flags, MODE(flags)); }
int openat(int at, const char *path, int flags, ...) { return recorded_open(at, path, flags, MODE(flags)); }
int openat64(int at, const char *path, int flags, ...) { return recorded_open(at, path, flags, MODE(flags)); }
int creat(const char *path, mode_t mode) { return recorded_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* The C library's own streams open their files past `open`. Their bytes pass us by, too. */
static FILE *recorded_fopen(const char *path, const char *how) {
    char full[PATH_MAX];
    if (strpbrk(how, "wa+") && resolve(AT_FDCWD, path, full)) give_up("a file is written through fopen");
    return NEXT(fopen)(path, how);
}
FILE *fopen(const char *path, const char *how) { return recorded_fopen(path, how); }
FILE *fopen64(const char *path, const char *how) { return recorded_fopen(path, how); }

#define WRITING(file, call, offset_now, bytes)                             \
    int64_t inode = recorded(file, NULL);                                  \
    if (!inode) return call;                                               \
    acquire();                                                             \
    int64_t start = offset_now;                                            \
    ssize_t done = call;                                                   \
    if (done > 0) bytes;                                                   \
    release();                                                             \
    return done

static int64_t position(int file) {
    struct stat status;
    if (fcntl(file, F_GETFL) & O_APPEND) return fstat(file, &status) ? 0 : status.st_size;
    return lseek(file, 0, SEEK_CUR);
}

static void add_parts(int64_t inode, int64_t start, const struct iovec *parts, size_t done) {
    for (; done; parts++) {
        size_t nbytes = parts->iov_len < done ? parts->iov_len : done;
        if (nbytes) add(WRITE, NULL, NULL, inode, start, parts->iov_base, nbytes);
        start += nbytes;
        done -= nbytes;
    }
}

ssize_t write(int file, const void *data, size_t nbytes) {
    WRITING(file, NEXT(write)(file, data, nbytes), position(file), add(WRITE, NULL, NULL, inode, start, data, done));
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    WRITING(file, NEXT(writev)(file, parts, count), position(file), add_parts(inode, start, parts, done));
}
#define AT(name, type)                                                                                               \
    ssize_t name(int file, const void *data, size_t nbytes, type at) {                                               \
        WRITING(file, NEXT(name)(file, data, nbytes, at), at, add(WRITE, NULL, NULL, inode, start, data, done));     \
    }
AT(pwrite, off_t)
AT(pwrite64, off64_t)
#define PARTS_AT(name, type)                                                                                         \
    ssize_t name(int file, const struct iovec *parts, int count, type at) {                                          \
        WRITING(file, NEXT(name)(file, parts, count, at), at, add_parts(inode, start, parts, done));                 \
    }
PARTS_AT(pwritev, off_t)
PARTS_AT(pwritev64, off64_t)

static ssize_t copied(int to, int64_t inode, int64_t start, ssize_t done) {
    if (done <= 0) return done;
    char *data = malloc(done);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", to);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (!data || file < 0 || pread(file, data, done, start) != done) give_up("copied bytes cannot be read");
    add(WRITE, NULL, NULL, inode, start, data, done);
    close(file);
    free(data);
    return done;
}
static ssize_t recorded_sendfile(int to, int from, off_t *offset, size_t count) {
    WRITING(to, NEXT(sendfile)(to, from, offset, count), position(to), copied(to, inode, start, done));
}
ssize_t sendfile(int to, int from, off_t *offset, size_t count) { return recorded_sendfile(to, from, offset, count); }
ssize_t sendfile64(int to, int from, off64_t *offset, size_t count) { return recorded_sendfile(to, from, offset, count); }
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *offset, size_t count, unsigned flags) {
    WRITING(to, NEXT(copy_file_range)(from, at, to, offset, count, flags), offset ? *offset : position(to),
            copied(to, inode, start, done));
}

static int recorded_length(int file, int64_t length, int status) {
    int64_t inode = recorded(file, NULL);
    if (inode && status == 0) add(LENGTH, NULL, NULL, inode, length, NULL, 0);
    return status;
}
#define LENGTHENS(call, length)                          \
    if (!recorded(file, NULL)) return call;              \
    acquire();                                           \
    int status = recorded_length(file, length, call);    \
    release();                                           \
    return status
int ftruncate(int file, off_t length) { LENGTHENS(NEXT(ftruncate)(file, length), length); }
int ftruncate64(int file, off64_t length) { LENGTHENS(NEXT(ftruncate64)(file, length), length); }
int truncate(const char *path, off_t length) {
    char full[PATH_MAX];
    if (resolve(AT_FDCWD, path, full)) give_up("truncate is not modelled");
    return NEXT(truncate)(path, length);
}
static int64_t longer(int file, int64_t end) {
    struct stat status;
    return fstat(file, &status) == 0 && status.st_size > end ? status.st_size : end;
}
int fallocate(int file, int mode, off_t at, off_t nbytes) {
    if (mode && recorded(file, NULL)) give_up("this mode of fallocate is not modelled");
    LENGTHENS(NEXT(fallocate)(file, mode, at, nbytes), longer(file, at + nbytes));
}
int fallocate64(int file, int mode, off64_t at, off64_t nbytes) {
    if (mode && recorded(file, NULL)) give_up("this mode of fallocate is not modelled");
    LENGTHENS(NEXT(fallocate64)(file, mode, at, nbytes), longer(file, at + nbytes));
}
int posix_fallocate(int file, off_t at, off_t nbytes) {
    LENGTHENS(NEXT(posix_fallocate)(file, at, nbytes), longer(file, at + nbytes));
}
void *mmap(void *at, size_t nbytes, int protection, int flags, int file, off_t offset) {
    if (file >= 0 && protection & PROT_WRITE && flags & MAP_SHARED && recorded(file, NULL))
        give_up("a file is written through a mapping");
    return (void *)syscall(SYS_mmap, at, nbytes, protection, flags, file, offset);
}
void *mmap64(void *at, size_t nbytes, int protection, int flags, int file, off64_t offset) {
    return mmap(at, nbytes, protection, flags, file, offset);
}

static int recorded_sync(int file, int (*sync)(int)) {
    int64_t inode = recorded(file, NULL);
    if (!inode) return sync(file);
    acquire();
    int status = sync(file);
    if (status == 0) add(SYNC, NULL, NULL, inode, 0, NULL, 0);
    release();
    return status;
}
int fsync(int file) { return recorded_sync(file, NEXT(fsync)); }
int fdatasync(int file) { return recorded_sync(file, NEXT(fdatasync)); }

/* -- names ----------------------------------------------------------------------------------------------------- */

static int recorded_rename(int from, const char *path, int to, const char *other, unsigned flags) {
    char full[PATH_MAX], full_other[PATH_MAX];
    int (*next)(int, const char *, int, const char *, unsigned) = NEXT(renameat2);
    int here = resolve(from, path, full), there = resolve(to, other, full_other);
    if (!here && !there) return next(from, path, to, other, flags);
    if (!here || !there) give_up("a file is renamed into or out of the folder");
    if (flags & ~2u) give_up("this rename is not modelled");
    acquire();
    int status = next(from, path, to, other, flags);
    if (status == 0) add(flags ? EXCHANGE : RENAME, full, full_other, 0, 0, NULL, 0);
    release();
    return status;
}
int rename(const char *path, const char *other) { return recorded_rename(AT_FDCWD, path, AT_FDCWD, other, 0); }
int renameat(int from, const char *path, int to, const char *other) { return recorded_rename(from, path, to, other, 0); }
int renameat2(int from, const char *path, int to, const char *other, unsigned flags) {
    return recorded_rename(from, path, to, other, flags);
}

#define NAMING(at, path, call, kind, other)                                                      \
    char full[PATH_MAX];                                                                         \
    if (!resolve(at, path, full)) return call;                                                   \
    acquire();                                                                                   \
    int status = call;                                                                           \
    if (status == 0) add(kind, full, other, inode_of(AT_FDCWD, full), 0, NULL, 0);               \
    release();                                                                                   \
    return status

int mkdirat(int at, const char *path, mode_t mode) {
    NAMING(at, path, NEXT(mkdirat)(at, path, mode), MAKE_FOLDER, NULL);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int symlinkat(const char *target, int at, const char *path) {
    NAMING(at, path, NEXT(symlinkat)(target, at, path), SYMLINK, target);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
int linkat(int from, const char *path, int to, const char *other, int flags) {
    char from_path[PATH_MAX];
    if (!resolve(from, path, from_path)) from_path[0] = 0;
    NAMING(to, other, NEXT(linkat)(from, path, to, other, flags), LINK, from_path);
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }
int unlinkat(int at, const char *path, int flags) {
    NAMING(at, path, NEXT(unlinkat)(at, path, flags), flags & AT_REMOVEDIR ? REMOVE_FOLDER : UNLINK, NULL);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    int status = unlink(path);
    return status && errno == EISDIR ? rmdir(path) : status;
}
