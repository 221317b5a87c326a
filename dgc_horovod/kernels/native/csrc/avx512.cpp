#include "loops.h"

const dgc::Instructions dgc::kAvx512 = {"AVX-512", update, count_at_least, sums, measure_row};
