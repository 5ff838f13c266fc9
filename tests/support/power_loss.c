/* Preloaded into a process: notes how much of each write-ahead log (*.log) has reached the disk, and can end the process
   right before a sync, where a power cut is worst: what was written is in memory only. A test then cuts the logs to what
   was noted.

   POWER_LOSS_LOG: file that gets a line "SIZE PATH" after each sync of a log.
   POWER_LOSS_AT: number of that sync, counted from 1, at which the process ends instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long syncs;

/* Puts the path of `fd` into `path`; returns whether it is a write-ahead log. */
static int is_log(int fd, char path[PATH_MAX + 1]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    path[length < 0 ? 0 : length] = 0;
    return length > 4 && strcmp(path + length - 4, ".log") == 0;
}

static void note(const char *path, long long size) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%lld %s\n", size, path);
    int out = open(getenv("POWER_LOSS_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (out < 0 || write(out, line, (size_t)length) != length) abort();
    close(out);
}

static int synced(int fd, const char *name) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    char path[PATH_MAX + 1];
    struct stat before;
    if (!is_log(fd, path) || fstat(fd, &before) != 0) return real(fd);
    if (atomic_fetch_add(&syncs, 1) + 1 == atol(getenv("POWER_LOSS_AT"))) kill(getpid(), SIGKILL);
    int failed = real(fd);
    if (!failed) note(path, before.st_size);
    return failed;
}

int fsync(int fd) { return synced(fd, "fsync"); }

int fdatasync(int fd) { return synced(fd, "fdatasync"); }
