// Old versions of the C library's functions, for the libraries that wheels carry.
//
// A linker takes the newest version of each function that its machine's C library has, and no older system loads the
// result. glibc keeps the old versions: with this file and -Wl,--wrap=NAME for each function below, a library that is
// linked beside any glibc loads beside 2.18 and newer, which is older than what torch needs. The numbers are the same:
// the versions differ in how they report errors, and pthread's in the file that they lie in.

#include <pthread.h>

#if defined(__x86_64__)
#define SPLAT_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define SPLAT_OLD_GLIBC "GLIBC_2.17"
#else
#error "which version of the C library was this machine's first?"
#endif

#define SPLAT_OLD(result, name, parameters, arguments)                   \
  extern "C" result old_##name parameters;                               \
  __asm__(".symver old_" #name ", " #name "@" SPLAT_OLD_GLIBC);          \
  extern "C" result __wrap_##name parameters { return old_##name arguments; }

// 2.29 made new versions of these, 2.34 of pthread's.
SPLAT_OLD(double, exp, (double x), (x))
SPLAT_OLD(double, exp2, (double x), (x))
SPLAT_OLD(double, log2, (double x), (x))
SPLAT_OLD(double, pow, (double x, double y), (x, y))
SPLAT_OLD(int, pthread_create,
          (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument),
          (thread, attributes, run, argument))
SPLAT_OLD(int, pthread_detach, (pthread_t thread), (thread))

// A variable that libstdc++ reads since GCC 11 and glibc has since 2.32: whether the process has one thread alone. As
// false it only takes atomic operations where others would do.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
