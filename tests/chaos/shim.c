/* Preloaded into Redis and Leeway's own processes of a run under faults (shim.py builds it).

   It reads numbers from a file that all map: by how much the wall clock is wrong, how long each write
   to a disk takes longer, and whether Redis is to stand still in the next write or sync of its
   append-only file, to be killed there. Ray's daemons keep their clock and their speed: absl waits by
   the kernel's clock, which nobody here may set. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
  volatile int64_t clock_ms;  /* added to the wall clock */
  volatile int64_t disk_us;   /* slept before each write to a regular file, and each sync */
  volatile int64_t hold;      /* 0, HOLD_WRITE or HOLD_SYNC */
  volatile int64_t part;      /* of the held write, in thousandths: so much of it is written */
  volatile int64_t held;      /* process id of who stands still, written by it */
};

enum { HOLD_WRITE = 1, HOLD_SYNC = 2 };

static struct control nothing;
static struct control *control = &nothing;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_ours(void) {
  char line[4096];
  int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = read(file, line, sizeof line - 1);
  close(file);
  if (size <= 0) return 0;
  for (ssize_t i = 0; i < size; i++)
    if (line[i] == 0) line[i] = ' ';
  line[size] = 0;
  return strstr(line, "redis-server") || strstr(line, "leeway.services.cli");
}

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("LEEWAY_CHAOS_CONTROL");
  if (!path || !is_ours()) return;
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) control = found;
}

static void shift(struct timespec *at, int64_t ms) {
  int64_t ns = at->tv_nsec + (ms % 1000) * 1000000;
  at->tv_sec += ms / 1000 + (ns < 0 ? -1 : ns >= 1000000000 ? 1 : 0);
  at->tv_nsec = ns < 0 ? ns + 1000000000 : ns >= 1000000000 ? ns - 1000000000 : ns;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int failed = real(clock, at);
  int64_t ms = control->clock_ms;
  if (!failed && ms && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(at, ms);
  return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

/* The kernel waits until a time of the real clock. A deadline above 1e9 s is of the wall clock; the
   monotonic one counts from the machine's start. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static __typeof__(&pthread_cond_timedwait) real;
  if (!real) real = REAL(pthread_cond_timedwait);
  struct timespec at = *until;
  if (at.tv_sec > 1000000000) shift(&at, -control->clock_ms);
  return real(cond, mutex, &at);
}

static void wait_for_disk(int file) {
  int64_t us = control->disk_us;
  if (!us) return;
  struct stat about;
  if (!fstat(file, &about) && S_ISREG(about.st_mode)) usleep((useconds_t)us);
}

/* Until SIGKILL, which needs no answer. */
static void stand_still(void) {
  control->held = getpid();
  for (;;) pause();
}

/* Scripts stand between MULTI and EXEC in the append-only file, and in nothing else that is written
   to a file. */
static int is_script(int file, const void *bytes, size_t size) {
  struct stat about;
  return memmem(bytes, size, "\r\nMULTI\r\n", 9) && !fstat(file, &about) && S_ISREG(about.st_mode);
}

static int last_script = -1; /* the file to which the last write was a script */

ssize_t write(int file, const void *bytes, size_t size) {
  static __typeof__(&write) real;
  if (!real) real = REAL(write);
  wait_for_disk(file);
  if (control->hold) {
    int found = is_script(file, bytes, size);
    if (found && control->hold == HOLD_WRITE) {
      real(file, bytes, size * (size_t)control->part / 1000);
      stand_still();
    }
    if (found) last_script = file;
  }
  return real(file, bytes, size);
}

static void hold_sync(int file) {
  if (control->hold == HOLD_SYNC && file == last_script) stand_still();
}

int fsync(int file) {
  static __typeof__(&fsync) real;
  if (!real) real = REAL(fsync);
  wait_for_disk(file);
  hold_sync(file);
  return real(file);
}

int fdatasync(int file) {
  static __typeof__(&fdatasync) real;
  if (!real) real = REAL(fdatasync);
  wait_for_disk(file);
  hold_sync(file);
  return real(file);
}
