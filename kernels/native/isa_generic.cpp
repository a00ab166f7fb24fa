// The version for every processor: vectors of 16 bytes.
#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 4
#if defined(__aarch64__)
#define PAGODA_REGISTERS 32
#else
#define PAGODA_REGISTERS 16
#endif
#include "ops.h"
#include "simd.h"

#include "isa.h"

extern constexpr pagoda::Ops pagoda::generic_ops = pagoda::make_ops("generic");
