// Sums of rows of several arrays: argument checks that no backend owns, then the backend of the
// device.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

void sum_rows(const tilemoe_sum_rows_args* args);

}  // namespace tilemoe
