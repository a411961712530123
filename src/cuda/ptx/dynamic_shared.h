// The shared memory that a launch asks for beyond a kernel's own.
//   TILEMOE_DYNAMIC_SHARED(float, values, alignof(float));  // float values[]
#pragma once

#define TILEMOE_DYNAMIC_SHARED(type, name, alignment) \
  extern __shared__ __align__(alignment)              \
  type name[]
