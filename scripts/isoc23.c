// What NVIDIA's libnccl_static.a asks of glibc 2.38 and later when it was built there, by the names that any glibc has, for scripts/release.sh. (The new names also read
// binary numbers, "0b1", which NCCL does not need.) The names behind asm are taken as they are, whatever this compiler's headers make of them.
#include <stdarg.h>
#include <stdio.h>

#define INTEGER(name, type)                                                    \
  extern type old_##name(const char*, char**, int) __asm__(#name);            \
  type __isoc23_##name(const char* text, char** end, int base) { return old_##name(text, end, base); }
INTEGER(strtol, long)
INTEGER(strtoul, unsigned long)
INTEGER(strtoll, long long)
INTEGER(strtoull, unsigned long long)

#define SCAN(name, from)                                                       \
  extern int old_v##name(from, const char*, va_list) __asm__("__isoc99_v" #name); \
  int __isoc23_##name(from at, const char* format, ...) {                     \
    va_list values;                                                           \
    va_start(values, format);                                                 \
    const int n = old_v##name(at, format, values);                            \
    va_end(values);                                                           \
    return n;                                                                 \
  }
SCAN(sscanf, const char*)
SCAN(fscanf, FILE*)
