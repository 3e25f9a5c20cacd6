/* Everything below one directory as if it lay on slow storage that all processes share: LD_PRELOAD for
 * benchmarks/staging, which compiles this.
 *
 * STORAGE_STATE names a file of one `struct storage`, mapped by all processes; STORAGE_PATH the directory. Opening a
 * file below it takes `open_ns` more. Reading takes tokens from the one bucket; a mapped file is read when it is
 * touched. Copying inside the kernel is refused as between two file systems, so that cp reads and writes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
#define TOUCHED (1 << 20)

struct storage {
    _Atomic int64_t next_ns; /* when the bucket will have refilled what was taken */
    _Atomic uint64_t bytes, opens;
    double ns_per_byte; /* 0: as fast as it can be */
    int64_t open_ns, depth_ns;
};

static struct storage *storage;
static const char *below;
static _Atomic unsigned char watched[FILES];

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *state = getenv("STORAGE_STATE");
    below = getenv("STORAGE_PATH");
    int file = state && below ? open(state, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *storage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) storage = mapped;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void sleep_until(int64_t then) {
    struct timespec end = {then / 1000000000, then % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR) {}
}

static int is_watched(int file) { return storage && file >= 0 && file < FILES && watched[file]; }

static ssize_t charge(int file, ssize_t count) {
    if (count <= 0 || !is_watched(file)) return count;
    int before = errno;
    atomic_fetch_add(&storage->bytes, count);
    if (storage->ns_per_byte > 0) {
        int64_t now, next, taken = atomic_load(&storage->next_ns);
        do { /* who wakes up late catches up, by as much as the bucket holds */
            now = now_ns();
            next = taken > now - storage->depth_ns ? taken : now - storage->depth_ns;
            next += (int64_t)(count * storage->ns_per_byte);
        } while (!atomic_compare_exchange_weak(&storage->next_ns, &taken, next));
        if (next > now) sleep_until(next);
    }
    errno = before;
    return count;
}

static int opened(int file, int flags) {
    if (!storage || file < 0 || file >= FILES) return file;
    int before = errno;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    size_t most = strlen(below);
    path[length > 0 ? length : 0] = 0;
    watched[file] = !(flags & O_DIRECTORY) && !strncmp(path, below, most) && path[most] == '/';
    if (watched[file]) {
        atomic_fetch_add(&storage->opens, 1);
        if (storage->open_ns) sleep_until(now_ns() + storage->open_ns);
    }
    errno = before;
    return file;
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return opened(real(path, flags, mode), flags); \
    }
#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return opened(real(directory, path, flags, mode), flags); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* What -D_FORTIFY_SOURCE makes of them. */
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int directory, const char *path, int flags) { return openat(directory, path, flags); }
int __openat64_2(int directory, const char *path, int flags) { return openat64(directory, path, flags); }

int close(int file) {
    REAL(close);
    if (file >= 0 && file < FILES) watched[file] = 0;
    return real(file);
}

static int same(int file, int old) {
    if (file >= 0 && file < FILES) watched[file] = (unsigned char)is_watched(old);
    return file;
}

int dup2(int old, int file) {
    REAL(dup2);
    return same(real(old, file), old);
}

int dup3(int old, int file, int flags) {
    REAL(dup3);
    return same(real(old, file, flags), old);
}

#define READ(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        return charge(file, real arguments); \
    }
READ(read, (int file, void *to, size_t count), (file, to, count))
READ(pread, (int file, void *to, size_t count, off_t at), (file, to, count, at))
READ(pread64, (int file, void *to, size_t count, off64_t at), (file, to, count, at))
READ(readv, (int file, const struct iovec *to, int parts), (file, to, parts))
READ(preadv, (int file, const struct iovec *to, int parts, off_t at), (file, to, parts, at))
READ(preadv64, (int file, const struct iovec *to, int parts, off64_t at), (file, to, parts, at))
READ(preadv2, (int file, const struct iovec *to, int parts, off_t at, int flags), (file, to, parts, at, flags))
READ(preadv64v2, (int file, const struct iovec *to, int parts, off64_t at, int flags), (file, to, parts, at, flags))
READ(sendfile, (int out, int file, off_t *at, size_t count), (out, file, at, count))
READ(sendfile64, (int out, int file, off64_t *at, size_t count), (out, file, at, count))

ssize_t __read_chk(int file, void *to, size_t count, size_t room) { return count > room ? -1 : read(file, to, count); }
ssize_t __pread_chk(int file, void *to, size_t count, off_t at, size_t room) {
    return count > room ? -1 : pread(file, to, count, at);
}
ssize_t __pread64_chk(int file, void *to, size_t count, off64_t at, size_t room) {
    return count > room ? -1 : pread64(file, to, count, at);
}

static int refused(int error) {
    errno = error;
    return -1;
}

ssize_t copy_file_range(int file, off64_t *at, int out, off64_t *out_at, size_t count, unsigned flags) {
    REAL(copy_file_range);
    return is_watched(file) ? refused(EXDEV) : real(file, at, out, out_at, count, flags);
}

ssize_t splice(int file, off64_t *at, int out, off64_t *out_at, size_t count, unsigned flags) {
    REAL(splice);
    return is_watched(file) ? refused(EINVAL) : real(file, at, out, out_at, count, flags);
}

int ioctl(int out, unsigned long request, ...) {
    REAL(ioctl);
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return request == FICLONE && is_watched((int)(intptr_t)argument) ? refused(EXDEV) : real(out, request, argument);
}

/* One mapped file per process is enough: sbcast's. */
static struct {
    char *begin;
    size_t length;
    int file;
} mapped;

static void touched(int number, siginfo_t *what, void *context) {
    (void)context;
    char *page = what->si_addr;
    if (!mapped.begin || page < mapped.begin || page >= mapped.begin + mapped.length) {
        signal(number, SIG_DFL);
        return; /* it happens again, and ends the process */
    }
    size_t at = (size_t)(page - mapped.begin) / TOUCHED * TOUCHED;
    size_t count = mapped.length - at < TOUCHED ? mapped.length - at : TOUCHED;
    mprotect(mapped.begin + at, count, PROT_READ | PROT_WRITE);
    if (pread(mapped.file, mapped.begin + at, count, (off_t)at) < 0) abort();
}

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t at) {
    REAL(mmap);
    if (!is_watched(file) || at || mapped.begin) return real(address, length, protection, flags, file, at);
    void *memory = real(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return memory;
    mapped.length = length;
    mapped.file = fcntl(file, F_DUPFD_CLOEXEC, 3); /* the caller closes its own */
    watched[mapped.file] = 1;
    mapped.begin = memory;
    struct sigaction action = {.sa_sigaction = touched, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    return memory;
}
