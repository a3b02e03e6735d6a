/* Storage as on a slow network mount, for a program that loads this library first (LD_PRELOAD): fstatfs says NFS, and every read at an offset takes
   $SLOW_MS milliseconds and is written down, its bytes in a line of $SLOW_LOG. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <unistd.h>

static ssize_t slow_read(const char *name, int fd, void *to, size_t n, off_t at) {
  ssize_t (*next)(int, void *, size_t, off_t) = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, name);
  FILE *log = fopen(getenv("SLOW_LOG"), "a");
  fprintf(log, "%zu\n", n);
  fclose(log);
  usleep(1000 * atoi(getenv("SLOW_MS")));
  return next(fd, to, n, at);
}

ssize_t pread(int fd, void *to, size_t n, off_t at) { return slow_read("pread", fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return slow_read("pread64", fd, to, n, at); }

static int nfs(const char *name, int fd, void *to) {
  int (*next)(int, void *) = (int (*)(int, void *))dlsym(RTLD_NEXT, name);
  int result = next(fd, to);
  ((struct statfs *)to)->f_type = 0x6969;
  return result;
}

int fstatfs(int fd, struct statfs *to) { return nfs("fstatfs", fd, to); }
int fstatfs64(int fd, struct statfs64 *to) { return nfs("fstatfs64", fd, to); }
