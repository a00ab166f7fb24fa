// Binds two functions to the versions that they had before glibc 2.29 and GCC 12, which do the same for the arguments here.
// The newest symbols left are those of glibc 2.27, so a wheel that a recent system compiles runs wherever torch's wheels do.
#pragma once

#include <cstdlib>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GLIBCXX__)
asm(".symver log, log@GLIBC_2.2.5");
asm(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    " _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
