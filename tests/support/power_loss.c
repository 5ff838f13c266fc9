/* Preloaded into a process: notes how much of each write-ahead log (*.log), table (*.sst, *.blob) and MANIFEST has
   reached the disk, and can end the process right before the sync of a log, where a power cut is worst: what was written
   is in memory only. A test then cuts the files to what was noted.

   POWER_LOSS_LOG: file that gets a line "SIZE PATH" after each sync of such a file.
   POWER_LOSS_AT: number of that sync of a log, counted from 1, at which the process ends instead. */
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

static int ends(const char *path, const char *with) {
    size_t length = strlen(path), tail = strlen(with);
    return length > tail && strcmp(path + length - tail, with) == 0;
}

/* Puts the path of `fd` into `path`. */
static void path_of(int fd, char path[PATH_MAX + 1]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    path[length < 0 ? 0 : length] = 0;
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
    path_of(fd, path);
    int is_log = ends(path, ".log");
    if (!is_log && !ends(path, ".sst") && !ends(path, ".blob") && !strstr(path, "/MANIFEST-")) return real(fd);
    if (fstat(fd, &before) != 0) return real(fd);
    if (is_log && atomic_fetch_add(&syncs, 1) + 1 == atol(getenv("POWER_LOSS_AT"))) kill(getpid(), SIGKILL);
    int failed = real(fd);
    if (!failed) note(path, before.st_size);
    return failed;
}

int fsync(int fd) { return synced(fd, "fsync"); }

int fdatasync(int fd) { return synced(fd, "fdatasync"); }
