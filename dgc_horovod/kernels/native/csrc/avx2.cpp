#include "loops.h"

const dgc::Instructions dgc::kAvx2 = {"AVX2", update, count_at_least, sums, measure_row};
