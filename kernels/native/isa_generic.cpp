#if !defined(__x86_64__)

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "ops.h"
#include "simd.h"

#include "isa.h"

extern constexpr pagoda::Ops pagoda::generic_ops = pagoda::make_ops("generic");

#endif
