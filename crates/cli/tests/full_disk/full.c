// A disk that is full for some files: LD_PRELOAD=full.so FULL_PATH=metrics.jsonl FULL_ROOM=100
// Files whose path has FULL_PATH in it take FULL_ROOM bytes together, and then no more.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long taken;

static int is_full(int fd) {
    const char *part = getenv("FULL_PATH");
    char link[64], path[4096];
    if (!part) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, part) != NULL;
}

// How many of n bytes a file takes; -1 where it takes none.
static ssize_t room(int fd, size_t n) {
    if (!n || !is_full(fd)) return n;
    const char *text = getenv("FULL_ROOM");
    long all = text ? atol(text) : 0, before = atomic_fetch_add(&taken, (long)n), left = all - before;
    if (left <= 0) {
        errno = ENOSPC;
        return -1;
    }
    return (long)n < left ? (ssize_t)n : left;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *from, size_t n) {
    ssize_t takes = room(fd, n);
    return takes < 0 ? -1 : REAL(write)(fd, from, takes);
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    ssize_t takes = room(fd, n);
    return takes < 0 ? -1 : REAL(pwrite)(fd, from, takes, at);
}

ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    ssize_t takes = room(fd, n);
    return takes < 0 ? -1 : REAL(pwrite64)(fd, from, takes, at);
}

ssize_t writev(int fd, const struct iovec *from, int count) {
    // A part is an answer too.
    return count > 0 && is_full(fd) ? write(fd, from[0].iov_base, from[0].iov_len) : REAL(writev)(fd, from, count);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags) {
    ssize_t takes = room(out, n);
    return takes < 0 ? -1 : REAL(copy_file_range)(in, from, out, to, takes, flags);
}
