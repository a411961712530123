// The CUDA runtime for the libraries that link tilemoe_cuda, which contains it: they have none of
// their own.
#pragma once

namespace tilemoe::verify {
class Memory;
}

#pragma GCC visibility push(default)
extern "C" {

// SMs of a GPU, as CUDA counts them; 0: CUDA cannot read them. Makes no context.
int tilemoe_runtime_sms(int device);

// Writes the id of the CUDA graph capture that a stream is in; 0: none. Returns the error, or null.
const char* tilemoe_runtime_capture(void* stream, unsigned long long* id);

// verify::cuda_memory().
tilemoe::verify::Memory* tilemoe_runtime_memory();

}  // extern "C"
#pragma GCC visibility pop
