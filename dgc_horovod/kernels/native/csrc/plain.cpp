#include "loops.h"

const dgc::Instructions dgc::kPlain = {"plain", update, count_at_least, sums, measure_row};
