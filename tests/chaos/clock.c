/* A wall clock that can jump, for every process that preloads this library: see faults.py.

   The file named by PAGODA_CHAOS_CLOCK holds seconds to add, as a 64-bit integer. Monotonic clocks are left alone, as
   they are when an administrator sets the time. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *jump_s;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("PAGODA_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *jump_s, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) jump_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = real_clock_gettime ? real_clock_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && jump_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *jump_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
